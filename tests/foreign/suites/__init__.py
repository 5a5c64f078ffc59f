"""The suites, the origin of their tests and their requirements."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Suite:
    """One row of the table.

    Attributes:
        name: of its folder below build/foreign, and on the command line.
        title: in the table.
        paths: files and folders with tests, in this folder or in the sources that PyPI has.
        shown: packages whose versions the table has; empty: torch's.
        packages: installed by pip for it, without dependencies: the project's environment has torch.
        sdist: the package whose sources bring its tests; empty: this folder has them.
        limit: at most so many tests run, chosen by a sum of their names; 0: all.
        small: bytes from which on a tensor may be evicted. C++ code reads tensors of one or two numbers by their addresses,
            which no budget of a user ever evicts.
        arguments: of pytest.
        variables: of the environment.
    """

    name: str
    title: str
    paths: tuple[str, ...]
    shown: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    sdist: str = ""
    limit: int = 0
    small: int = 64
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


_GAUSSIAN = ("linear_operator", "jaxtyping", "wadler_lindig")
_DATASETS = "diffusers datasets pyarrow pandas python-dateutil pytz tzdata six dill multiprocess xxhash".split()

_ALL = (
    Suite("op_db", "torch: `op_db`, `hop_db`, `autograd_function_db`, every dtype", ("suites/op_db.py",), small=1),
    Suite("optim_db", "torch: `optim_db`", ("suites/optim_db.py",), small=1),
    Suite(
        "distributed",
        "torch: `DistributedTest` over gloo, 3 ranks",
        ("suites/distributed.py",),
        variables={"BACKEND": "gloo", "WORLD_SIZE": "3", "TEMP_DIR": "/tmp"},
    ),
    Suite(
        "linear_operator",
        "linear_operator's own tests",
        ("test",),
        ("linear_operator",),
        _GAUSSIAN,
        "linear_operator",
        300,
    ),
    Suite(
        "gpytorch",
        "gpytorch's own tests",
        ("test",),
        ("gpytorch", "linear_operator"),
        ("gpytorch", *_GAUSSIAN, "scikit-learn", "joblib", "threadpoolctl"),
        "gpytorch",
        120,
    ),
    Suite("torchdiffeq", "torchdiffeq: solvers and adjoints", ("suites/torchdiffeq_solvers.py",), ("torchdiffeq",), ("torchdiffeq",)),
    Suite("higher", "higher: inner loops of its optimizers", ("suites/higher_loops.py",), ("higher",), ("higher",)),
    Suite("peft", "peft's own tests of its methods", ("tests/test_custom_models.py", "tests/test_initialization.py"), ("peft",), ("parameterized", *_DATASETS), "peft", 150),
    Suite("timm", "timm: one small model of each family", ("suites/timm_zoo.py",), ("timm",), ("timm", "torchvision==0.28.*"), limit=70),
    Suite(
        "transformers",
        "transformers' common tests of ten models",
        ("suites/transformers_common.py",),
        ("transformers",),
        ("parameterized",),
        "transformers",
        250,
    ),
)  # fmt: skip
SUITES: dict[str, Suite] = {suite.name: suite for suite in _ALL}
