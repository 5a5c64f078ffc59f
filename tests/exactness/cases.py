"""The registry of training cases: name -> ``fn(seed, scope) -> Record``.

Every case builds its model from random weights, trains a few steps and records losses, parameters, gradients, buffers,
optimizer state and the RNG streams.  ``scope()`` is entered around the training loop (see ``harness``).  Activations are
made to outweigh the parameters, so that half of the peak is a budget that can be met.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .harness import Record, Scope

CaseFunction = Callable[[int, Scope], Record]


@dataclass(frozen=True)
class Case:
    """One training script.

    Attributes:
        slow: takes more than about five seconds over all modes.
        moves: saves activations that memmgr can let go of.
        recomputes: has recorded ops whose results can be made again.
    """

    name: str
    fn: CaseFunction
    slow: bool = False
    moves: bool = True
    recomputes: bool = True


CASES: dict[str, Case] = {}


def case(name: str | None = None, **flags: bool) -> Callable[[CaseFunction], CaseFunction]:
    def register(fn: CaseFunction) -> CaseFunction:
        key = name or fn.__name__
        assert key not in CASES, key
        CASES[key] = Case(key, fn, **flags)
        return fn

    return register


Loss = Callable[[nn.Module, Any], torch.Tensor]


def adamw(model: nn.Module, **kw: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, **kw)


def sgd(model: nn.Module, **kw: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-4, **kw)


def train(
    model: nn.Module,
    batches: Iterable[Any],
    loss_of: Loss,
    scope: Scope,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    accumulate: int = 1,
) -> Record:
    """The four-line training loop; the last step's gradients are left in place, to be compared."""
    record = Record()
    opt = optimizer(model)
    model.train()
    with scope():
        for step, batch in enumerate(batches):
            if step % accumulate == 0:
                opt.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            record.losses(loss.detach())
            if (step + 1) % accumulate == 0:
                opt.step()
    del loss
    return record.ended(model, opt)


STEPS = 4


def _ids(batch: int = 8, length: int = 24, vocab: int = 96) -> torch.Tensor:
    return torch.randint(4, vocab, (batch, length))


def _lm(batch: int = 8, length: int = 24) -> dict[str, torch.Tensor]:
    ids = _ids(batch, length)
    return {"input_ids": ids, "labels": ids.clone()}


def _pictures(classes: int = 5, batch: int = 6, size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, classes, (batch,))}


def _hf(name: str, **small: Any) -> Callable[..., nn.Module]:
    """A function that builds that model of transformers, of this size but for its own arguments."""

    def build(**kw: Any) -> nn.Module:
        import transformers

        cls = getattr(transformers, name)
        return cls(cls.config_class(**small | kw))

    return build


_BERT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT |= {"intermediate_size": 64, "max_position_embeddings": 64}
_LLAMA = _BERT | {"num_key_value_heads": 2, "attention_dropout": 0.1, "pad_token_id": 0}
_EXPERTS = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
_STAGES = {"depths": [2, 2], "num_labels": 5}
_GPT2 = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
_gpt2 = _hf("GPT2LMHeadModel", **_GPT2, bos_token_id=1, eos_token_id=2)
_llama = _hf("LlamaForCausalLM", **_LLAMA)
_bert = _hf("BertForMaskedLM", **_BERT)
_mixtral = _hf("MixtralForCausalLM", **_LLAMA | _EXPERTS)
_t5 = _hf(
    "T5ForConditionalGeneration",
    vocab_size=96,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)
_resnet = _hf("ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], layer_type="basic", **_STAGES)
_convnext = _hf("ConvNextForImageClassification", num_stages=2, hidden_sizes=[8, 16], drop_path_rate=0.2, **_STAGES)
_swin = _hf(
    "SwinForImageClassification",
    **{"image_size": 32, "patch_size": 4, "embed_dim": 16, "num_heads": [2, 4], "window_size": 4, **_STAGES},
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
)
_mamba = _hf(
    "MambaForCausalLM", vocab_size=96, hidden_size=16, state_size=4, num_hidden_layers=1, expand=2, time_step_rank=2
)


def _bert_batch(batch: int = 8, length: int = 24) -> dict[str, torch.Tensor]:
    ids = _ids(batch, length)
    mask = torch.ones_like(ids)
    mask[::2, length * 3 // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(torch.rand(ids.shape) > 0.3, -100)}


HF: dict[
    str,
    tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]], Callable[[nn.Module], torch.optim.Optimizer]],
] = {
    "hf_gpt2": (_gpt2, _lm, adamw),
    "hf_gpt2_eager_attention": (lambda: _gpt2(attn_implementation="eager"), _lm, lambda m: adamw(m, foreach=True)),
    "hf_llama": (_llama, _lm, lambda m: adamw(m, fused=True)),
    "hf_bert": (_bert, _bert_batch, adamw),
    "hf_t5": (_t5, lambda: {"input_ids": _ids(6, 20), "labels": _ids(6, 12)}, adamw),
    "hf_resnet": (_resnet, _pictures, sgd),
    "hf_convnext": (_convnext, _pictures, adamw),
    "hf_swin": (_swin, _pictures, adamw),
    "hf_mixtral": (_mixtral, _lm, adamw),
    "hf_mamba": (_mamba, lambda: _lm(4, 12), adamw),
}


def _hf_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def _hf_case(
    build: Callable[[], nn.Module], batch: Callable[[], Any], optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> CaseFunction:
    def fn(seed: int, scope: Scope) -> Record:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' own advice on optional kernels
            return train(build(), [batch() for _ in range(STEPS)], _hf_loss, scope, optimizer)

    return fn


for _name, (_build, _batch, _optimizer) in HF.items():
    case(_name)(_hf_case(_build, _batch, _optimizer))


MID: dict[str, CaseFunction] = {}
"""A million parameters and more: kernels take their blocked paths, and where there are two threads their parallel ones,
for every OMP_NUM_THREADS. (All with two would take minutes on a machine that has other things to do.)"""


def _mid(
    name: str, build: Callable[[], nn.Module], batch: Callable[[], dict[str, torch.Tensor]], threads: int = 1
) -> None:
    def fn(seed: int, scope: Scope) -> Record:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # transformers' own advice on optional kernels
                model = build()
                assert sum(p.numel() for p in model.parameters()) > 1_000_000
                return train(model, [batch() for _ in range(3)], _hf_loss, scope)
        finally:
            torch.set_num_threads(before)

    MID[name] = fn


_mid("gpt2", lambda: _gpt2(n_embd=160, n_layer=4, n_head=5, n_positions=96), lambda: _lm(8, 96))
_WIDE = {"hidden_size": 160, "intermediate_size": 512, "max_position_embeddings": 96}
_mid("llama", lambda: _llama(**_WIDE, num_hidden_layers=4), lambda: _lm(8, 96))
_mid("mixtral", lambda: _mixtral(**_WIDE | {"intermediate_size": 256}), lambda: _lm(8, 64))
_mid("bert", lambda: _bert(**_WIDE, num_hidden_layers=4), lambda: _bert_batch(8, 96))
_mid(
    "t5",
    lambda: _t5(d_model=160, d_kv=40, d_ff=512, num_layers=3),
    lambda: {"input_ids": _ids(8, 64), "labels": _ids(8, 48)},
)
_mid(
    "resnet",
    lambda: _resnet(embedding_size=32, hidden_sizes=[32, 64, 128, 192], depths=[1, 1, 2, 1]),
    lambda: _pictures(batch=8, size=64),
    threads=2,
)


@case()
def hf_gpt2_gradient_checkpointing(seed: int, scope: Scope) -> Record:
    model = _gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return train(model, [_lm() for _ in range(STEPS)], _hf_loss, scope)


@case()
def hf_llama_gradient_checkpointing_reentrant(seed: int, scope: Scope) -> Record:
    model = _llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return train(model, [_lm() for _ in range(STEPS)], _hf_loss, scope)


@case()
def peft_lora_bf16(seed: int, scope: Scope) -> Record:
    from peft import LoraConfig, get_peft_model

    base = _llama().to(torch.bfloat16)
    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    )
    assert not model.base_model.model.model.embed_tokens.weight.requires_grad
    return train(model, [_lm() for _ in range(STEPS)], _hf_loss, scope)


@case()
def peft_lora_gradient_checkpointing(seed: int, scope: Scope) -> Record:
    from peft import LoraConfig, get_peft_model

    base = _gpt2().to(torch.bfloat16)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fan_in_fan_out of Conv1D
        model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))
    return train(model, [_lm() for _ in range(STEPS)], _hf_loss, scope)


@case()
def autocast_bf16(seed: int, scope: Scope) -> Record:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**batch).loss

    return train(_gpt2(), [_lm() for _ in range(STEPS)], loss, scope)


@case()
def autocast_bf16_backward_inside(seed: int, scope: Scope) -> Record:
    """The backward runs inside the autocast region (not advised, often done), and the weight cache is shared by two forwards."""
    model = MLP()
    opt, record = adamw(model), Record()
    with scope():
        for _ in range(STEPS):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(64, 32)).square().mean() + model(torch.randn(64, 32)).abs().mean()
                loss.backward()
            record.losses(loss.detach())
            opt.step()
    del loss
    return record.ended(model)


@case()
def gradient_accumulation(seed: int, scope: Scope) -> Record:
    return train(_gpt2(), [_lm(4) for _ in range(9)], lambda m, b: m(**b).loss / 3, scope, accumulate=3)


class MLP(nn.Module):
    """Dropout, batch norm, layer norm and an in-place activation, wide against its parameters."""

    def __init__(self, width: int = 32, hidden: int = 64, depth: int = 3, p: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, hidden),
                nn.BatchNorm1d(hidden),
                nn.ReLU(inplace=True),
                nn.Dropout(p),
                nn.Linear(hidden, width),
                nn.LayerNorm(width),
                nn.GELU(),
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@case()
def mlp(seed: int, scope: Scope) -> Record:
    return train(MLP(), [torch.randn(256, 32) for _ in range(6)], _mean_square, scope, sgd)


@case()
def lstm(seed: int, scope: Scope) -> Record:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(16, 24, num_layers=2, dropout=0.1, bidirectional=True, batch_first=True)
            self.head = nn.Linear(48, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(x)[0])

    return train(Model(), [torch.randn(16, 20, 16) for _ in range(STEPS)], _mean_square, scope)


@case()
def gru_packed(seed: int, scope: Scope) -> Record:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.GRU(16, 24, num_layers=2, dropout=0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lengths = torch.tensor([20, 17, 11, 9, 9, 5, 2, 1])
            out, h = self.inner(nn.utils.rnn.pack_padded_sequence(x, lengths))
            return nn.utils.rnn.pad_packed_sequence(out)[0] + h[-1]

    return train(Model(), [torch.randn(20, 8, 16) for _ in range(STEPS)], _mean_square, scope)


class CellLoop(nn.Module):
    """Every hidden state stays in a Python list: much of it is held by the program itself."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, width)
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[1], self.cell.hidden_size)
        outputs = []
        for step in x:
            h, c = self.cell(step, (h, c))
            outputs.append(F.dropout(h, 0.1))
        return self.head(torch.stack(outputs))


@case()
def lstm_cell_loop(seed: int, scope: Scope) -> Record:
    return train(CellLoop(), [torch.randn(24, 16, 16) for _ in range(STEPS)], _mean_square, scope)


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def double(i: int, o: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
                nn.Conv2d(o, o, 3, padding=1),
                nn.GroupNorm(2, o),
                nn.SiLU(inplace=True),
            )

        self.down = nn.ModuleList([double(3, width), double(width, 2 * width)])
        self.middle = double(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.merge = nn.ModuleList([double(4 * width, 2 * width), double(2 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], 1))
        return self.head(F.dropout2d(x, 0.1))


@case()
def unet(seed: int, scope: Scope) -> Record:
    return train(UNet(), [torch.randn(4, 3, 32, 32) for _ in range(STEPS)], _mean_square, scope)


class DenseBlock(nn.Module):
    def __init__(self, width: int = 8, growth: int = 6, depth: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width + i * growth),
                nn.ReLU(inplace=True),
                nn.Conv2d(width + i * growth, growth, 3, padding=1),
            )
            for i in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(F.dropout(layer(torch.cat(features, 1)), 0.1))
        return torch.cat(features, 1)


@case()
def densenet_block(seed: int, scope: Scope) -> Record:
    return train(DenseBlock(), [torch.randn(4, 8, 16, 16) for _ in range(STEPS)], _mean_square, scope, sgd)


class TreeLSTM(nn.Module):
    """Recursion over random trees, and a depth that depends on the values: the graph differs from pass to pass."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.leaf = nn.Linear(8, width)
        self.gates = nn.Linear(2 * width, 5 * width)

    def node(self, tree: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(tree, torch.Tensor):
            h = torch.tanh(self.leaf(tree))
            return h, torch.zeros_like(h)
        (lh, lc), (rh, rc) = self.node(tree[0]), self.node(tree[1])
        i, lf, rf, o, u = self.gates(torch.cat([lh, rh], -1)).chunk(5, -1)
        c = torch.sigmoid(lf) * lc + torch.sigmoid(rf) * rc + torch.sigmoid(i) * torch.tanh(u)
        h = torch.sigmoid(o) * torch.tanh(c)
        while h.abs().sum().item() < 250.0:  # data-dependent
            h = F.dropout(h * 1.5, 0.05)
        return h, c

    def forward(self, tree: Any) -> torch.Tensor:
        return self.node(tree)[0]


def _tree(depth: int) -> Any:
    if depth == 0 or (depth < 3 and torch.rand(()).item() < 0.3):
        return torch.randn(32, 8)
    return _tree(depth - 1), _tree(depth - 1)


@case()
def tree_lstm(seed: int, scope: Scope) -> Record:
    return train(TreeLSTM(), [_tree(4) for _ in range(STEPS)], _mean_square, scope)


@case()
def variable_shapes(seed: int, scope: Scope) -> Record:
    """Lengths alternate and sometimes surprise: plans are per signature, and the dynamic policies finish deviating
    passes."""
    lengths = (12, 24, 12, 24, 12, 31, 12, 24)
    return train(_gpt2(), [_lm(6, n) for n in lengths], _hf_loss, scope)


@case()
def inplace_ops(seed: int, scope: Scope) -> Record:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32)
            self.register_buffer("mean", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x).relu_()
            h = self.b(h)
            h += 1.0
            h.mul_(torch.rand_like(h))
            h = h.tanh()
            g = h * 2
            g[:, ::2].mul_(0.5)  # a write through a view
            g.view(-1, 2, 32).select(1, 0).add_(0.25)
            g = g.masked_fill_(torch.rand_like(g) < 0.1, 0.0)
            rows = torch.arange(0, g.shape[0], 3)
            g = g.clone().index_put_((rows,), g[rows] * 3, accumulate=True)
            g.index_add_(0, rows, h[rows])
            g.clamp_(-2, 2).exp_()
            with torch.no_grad():
                self.mean.lerp_(g.mean(0), 0.1)
            out = self.c(g).sigmoid_()
            noise = torch.empty_like(out)
            noise.normal_()
            out = out * noise
            return F.leaky_relu_(out, 0.1)

    return train(Model(), [torch.randn(128, 32) for _ in range(STEPS)], _mean_square, scope)


@case()
def views_saved(seed: int, scope: Scope) -> Record:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)
            self.scale = nn.Parameter(torch.randn(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            a = (q @ k.transpose(-1, -2)).softmax(-1)
            v = v * a.narrow(-1, 0, 1).expand(-1, -1, 32) * self.scale.expand_as(v)
            w = (v.exp() + 1).as_strided(
                (v.shape[0], 8, 16), (v.stride(0), 32, 2), 1
            )  # overlapping nothing, dense nowhere
            w = w * w.flip(1) * w.roll(1, 2)
            u = v.unfold(1, 4, 2).permute(0, 3, 1, 2)
            u = u * u.mT.mT.sigmoid()
            z = torch.cat(v.unbind(1)[:4], -1).unflatten(-1, (4, 32)).diagonal(dim1=1, dim2=2)
            z = z * z.tanh()
            r = torch.view_as_real(torch.view_as_complex(v.reshape(*v.shape[:-1], 16, 2)) ** 2).flatten(-2)
            return (a @ v).sum(-1).mean() + w.mean() + u.mean() + z.mean() + (r * r.detach()).mean()

    return train(Model(), [torch.randn(8, 16, 32) for _ in range(STEPS)], lambda m, x: m(x), scope)


@case()
def weight_tying(seed: int, scope: Scope) -> Record:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 32)
            self.inner = nn.Linear(32, 32)
            self.again = self.inner
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h = self.embed(ids)
            h = h + F.dropout(self.inner(h).tanh(), 0.1)
            h = h + F.dropout(self.again(h).tanh(), 0.1)
            return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())

    return train(Model(), [_ids(8, 24, 64) for _ in range(STEPS)], lambda m, x: m(x), scope)


def _checkpointed(use_reentrant: bool) -> CaseFunction:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.blocks = nn.ModuleList(MLP(depth=1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = F.dropout(checkpoint(block, x, use_reentrant=use_reentrant), 0.1)
            return x

    return lambda seed, scope: train(Model(), [torch.randn(128, 32) for _ in range(STEPS)], _mean_square, scope)


case("checkpoint_reentrant")(_checkpointed(True))
case("checkpoint_non_reentrant")(_checkpointed(False))


@case()
def checkpoint_nested(seed: int, scope: Scope) -> Record:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = MLP(depth=1), MLP(depth=1)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.a, x, use_reentrant=False) * torch.rand_like(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(checkpoint(self.inner, x.exp(), use_reentrant=False))

    return train(Model(), [torch.randn(64, 32) for _ in range(STEPS)], _mean_square, scope)


def _frames() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _fresh_dynamo() -> None:
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


@case()
def compiled_submodule(seed: int, scope: Scope) -> Record:
    """Compared with the compiled unmanaged run; that it was compiled under the budget too is part of the record."""
    _fresh_dynamo()

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = MLP(depth=1)
            self.compiled = Part()
            self.compiled.compile(fullgraph=True, dynamic=False)
            self.last = MLP(depth=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.compiled(self.first(x)))

    record = train(Model(), [torch.randn(256, 32) for _ in range(STEPS)], _mean_square, scope)
    record.put("compiled frames", _frames())
    assert _frames() > 0, "nothing was compiled"
    return record


@case(recomputes=False)  # one opaque call: its tensors can only be copied
def compiled_aot_eager(seed: int, scope: Scope) -> Record:
    _fresh_dynamo()
    model = MLP(depth=2, p=0.0)
    step = torch.compile(model, backend="aot_eager", dynamic=False)
    record = train(model, [torch.randn(128, 32) for _ in range(STEPS)], lambda _, x: step(x).square().mean(), scope)
    record.put("compiled frames", _frames())
    assert _frames() > 0, "nothing was compiled"
    return record


@case()
def compiled_optimizer_step(seed: int, scope: Scope) -> Record:
    _fresh_dynamo()
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 32), nn.Sigmoid())
    opt, record = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), Record()
    step = torch.compile(opt.step, dynamic=False)
    with scope():
        for _ in range(STEPS):
            opt.zero_grad()
            loss = model(torch.randn(256, 32)).square().mean()
            loss.backward()
            record.losses(loss.detach())
            step()
    del loss
    record.model(model)
    record.optimizer(opt)
    record.rng()
    assert _frames() > 0, "nothing was compiled"
    return record


@case()
def cond(seed: int, scope: Scope) -> Record:
    _fresh_dynamo()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x).tanh()
            h = torch.cond(h.sum() > 0, lambda t: t.sin() * t, lambda t: t.cos() + t, (h,))
            return self.b(h).exp()

    return train(Model(), [torch.randn(128, 32) * (-1) ** i for i in range(STEPS)], _mean_square, scope)


@case()
def gradient_penalty(seed: int, scope: Scope) -> Record:
    """``create_graph``: the backward is itself recorded and differentiated."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        score = model(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * (gradient.norm(2, -1) - 1).square().mean()

    model = nn.Sequential(
        nn.Linear(32, 64),
        nn.Softplus(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.LayerNorm(64),
        nn.Linear(64, 1),
    )
    return train(model, [torch.randn(128, 32) for _ in range(STEPS)], loss, scope)


@case()
def maml_inner_steps(seed: int, scope: Scope) -> Record:
    """Two differentiable SGD steps inside the loss, by ``torch.func.functional_call``."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        params = dict(model.named_parameters())
        for _ in range(2):
            inner = torch.func.functional_call(model, params, (x,)).square().mean()
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            params = {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads, strict=True)}
        return torch.func.functional_call(model, params, (x.flip(0),)).square().mean()

    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Dropout(0.1), nn.Linear(48, 32))
    return train(model, [torch.randn(128, 32) for _ in range(STEPS)], loss, scope)


@case()
def retain_graph(seed: int, scope: Scope) -> Record:
    model = MLP()
    opt, record = adamw(model), Record()
    with scope():
        for _ in range(STEPS):
            opt.zero_grad()
            h = model(torch.randn(128, 32))
            h.square().mean().backward(retain_graph=True)
            record.losses(torch.autograd.grad(h.abs().mean(), model.blocks[0][0].weight, retain_graph=True)[0])
            h.tanh().mean().backward()
            opt.step()
    del h
    return record.ended(model, opt)


def _optimizer_in_backward(detached: bool) -> CaseFunction:
    def fn(seed: int, scope: Scope) -> Record:
        model, record = MLP(p=0.1), Record()
        opts = {p: torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in model.parameters()}

        def step(p: torch.Tensor) -> None:
            opts[p].step()
            opts[p].zero_grad()

        # A hook that names the model makes a cycle through C++ that no collector sees: removed at the end.
        hooks = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
        with scope():
            for _ in range(STEPS):
                x = torch.randn(128, 32)
                h = model(x)
                if detached:
                    # The last weight is used once more, through detach(): its optimizer step comes before the first
                    # layers' backward, whose recipes must not see the new value.
                    w = model.blocks[-1][0].weight.detach()
                    h = h * torch.sigmoid(x @ w.t() @ w)
                    early = torch.exp(0.1 * (x @ w.t()))  # a recomputable that reads w
                    h = h + model.blocks[0][0](x * early[:, :32].sigmoid())[:, :32]
                loss = h.square().mean()
                del h
                loss.backward()
                record.losses(loss.detach())
        for hook in hooks:
            hook.remove()
        del loss
        return record.ended(model)

    return fn


case("optimizer_in_backward")(_optimizer_in_backward(False))
case("optimizer_in_backward_after_detach")(_optimizer_in_backward(True))


@case()
def gan(seed: int, scope: Scope) -> Record:
    g = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.Tanh())
    d = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.2), nn.Linear(64, 1))
    og, od, record = (
        torch.optim.Adam(g.parameters(), betas=(0.5, 0.9)),
        torch.optim.RMSprop(d.parameters(), momentum=0.1),
        Record(),
    )
    with scope():
        for _ in range(STEPS):
            real, fake = torch.randn(128, 32), g(torch.randn(128, 16))
            od.zero_grad()
            d_loss = F.softplus(d(fake.detach())).mean() + F.softplus(-d(real)).mean()
            d_loss.backward()
            od.step()
            og.zero_grad()
            g_loss = F.softplus(-d(fake)).mean()
            g_loss.backward()
            og.step()
            record.losses(d_loss.detach())
            record.losses(g_loss.detach())
    del d_loss, g_loss, fake
    for name, model, opt in (("g", g, og), ("d", d, od)):
        record.model(model, name)
        record.optimizer(opt, f"{name} optimizer")
    record.rng()
    return record


class SavesTemporary(torch.autograd.Function):
    """Saves a tensor that is neither an input nor an output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(x) * torch.rand_like(x)
        ctx.save_for_backward(gate, x)
        return gate * x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        gate, x = ctx.saved_tensors
        return 2 * grad * gate * x


class HoldsOnCtx(torch.autograd.Function):
    """Keeps its input on ``ctx``, past every hook."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x.exp()
        return ctx.x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.x


class RawCrossEntropy(torch.autograd.Function):
    """Fused cross-entropy as triton writes it: the logits' own memory is turned into their gradient, unseen by torch."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(logits, target)
        gradient = logits.softmax(-1)
        gradient[torch.arange(len(target)), target] -= 1.0
        gradient /= len(target)
        ctypes.memmove(logits.data_ptr(), gradient.data_ptr(), gradient.nbytes)
        ctx.save_for_backward(logits.detach())
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None


def _function_case(use: Callable[[torch.Tensor], torch.Tensor]) -> CaseFunction:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = MLP(depth=1), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(use(self.b(self.a(x))).tanh()).sigmoid()

    return lambda seed, scope: train(Model(), [torch.randn(128, 32) for _ in range(STEPS)], _mean_square, scope)


case("function_saves_temporary")(_function_case(lambda h: SavesTemporary.apply(h)))
case("function_holds_on_ctx")(_function_case(lambda h: HoldsOnCtx.apply(h) + HoldsOnCtx.apply(h * 0.5)))


@case()
def function_raw_cross_entropy(seed: int, scope: Scope) -> Record:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = MLP(depth=2), nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            target = x.abs().sum(-1).long() % 64
            return RawCrossEntropy.apply(self.head(self.body(x)), target)

    return train(Model(), [torch.randn(256, 32) for _ in range(STEPS)], lambda m, x: m(x), scope)


@case()
def raw_writes(seed: int, scope: Scope) -> Record:
    """A recorded op makes ``t``; raw code then writes into it; ops after that save it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x).tanh()
            s = h * h  # saved before the write: unmanaged, the backward sees the written values
            for write in (_write_numpy, _write_ctypes, _write_storage, _write_dlpack):
                t = h.detach().exp()
                write(t)
                s = s + self.a(x) * t  # saved after it
            return self.b(s.sigmoid())

    return train(Model(), [torch.randn(128, 32) for _ in range(STEPS)], _mean_square, scope)


def _write_numpy(t: torch.Tensor) -> None:
    t.numpy()[::3] = 0.5


def _write_ctypes(t: torch.Tensor) -> None:
    (ctypes.c_float * t.numel()).from_address(t.data_ptr())[5:500] = [0.25] * 495


def _write_storage(t: torch.Tensor) -> None:
    ctypes.memset(t.untyped_storage().data_ptr(), 0, t.nbytes // 2)


def _write_dlpack(t: torch.Tensor) -> None:
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t))[7].zero_()


class Trip(torch.autograd.Function):
    """The identity, until told to raise in its backward."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Trip.armed:
            raise ArithmeticError("tripped in backward")
        return grad


def _trips(where: str) -> CaseFunction:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = MLP(depth=2), MLP(depth=2)
            self.armed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            if self.armed:
                raise ArithmeticError("tripped in forward")
            h = Trip.apply(h)
            return self.b(h)

    def fn(seed: int, scope: Scope) -> Record:
        model = Model()
        opt, record, caught = adamw(model), Record(), 0
        with scope():
            for step in range(6):
                opt.zero_grad()
                wrong = step in (1, 2, 4)
                model.armed = wrong and where == "forward"
                Trip.armed = wrong and where == "backward"
                try:
                    loss = _mean_square(model, torch.randn(128, 32))
                    if where == "hook" and wrong:
                        handle = model.a.blocks[1][0].weight.register_hook(_raise)
                    loss.backward()
                    opt.step()
                    record.losses(loss.detach())
                except ArithmeticError as e:
                    caught += 1
                    record.put(f"error[{step}]", str(e))
                finally:
                    Trip.armed = False
                    if where == "hook" and wrong:
                        handle.remove()
        assert caught == 3
        del loss
        return record.ended(model, opt)

    return fn


def _raise(grad: torch.Tensor) -> None:
    raise ArithmeticError("tripped in a hook")


case("exception_in_forward")(_trips("forward"))
case("exception_in_backward")(_trips("backward"))
case("exception_in_hook")(_trips("hook"))


@case()
def attention_sdpa_dropout(seed: int, scope: Scope) -> Record:
    """``scaled_dot_product_attention`` with dropout and with a mask, and ``nn.TransformerEncoderLayer``."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.layer(x)).chunk(3, -1))
            a = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            b = F.scaled_dot_product_attention(a, k, v, attn_mask=torch.rand(x.shape[1], x.shape[1]) > 0.2)
            return b * F.scaled_dot_product_attention(q, k, v)

    return train(Model(), [torch.randn(8, 16, 32) for _ in range(STEPS)], _mean_square, scope)


@case()
def conv_transposes_and_norms(seed: int, scope: Scope) -> Record:
    """Channels-last, dilation, groups, instance norm with running stats, rrelu: ops with hidden writes and layouts."""
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=2, dilation=2),
        nn.InstanceNorm2d(12, affine=True, track_running_stats=True),
        nn.RReLU(),
        nn.Conv2d(12, 12, 3, groups=4),
        nn.BatchNorm2d(12, momentum=None),
        nn.PReLU(12),
        nn.AvgPool2d(2),
        nn.ConvTranspose2d(12, 6, 4, 2, 1),
        nn.Dropout2d(0.1),
        nn.ELU(inplace=True),
        nn.AdaptiveMaxPool2d(5),
        nn.BatchNorm2d(6, affine=False),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Hardswish(inplace=True),
    ).to(memory_format=torch.channels_last)
    return train(
        model,
        [torch.randn(4, 3, 24, 24).to(memory_format=torch.channels_last) for _ in range(STEPS)],
        _mean_square,
        scope,
        sgd,
    )


@case()
def many_losses(seed: int, scope: Scope) -> Record:
    """Losses with buffers of their own, index tensors, ctc, embedding bag."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.a = nn.EmbeddingBag(64, 32, mode="max"), nn.Linear(32, 20)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h = self.a(self.bag(ids))
            logits = h.log_softmax(-1)
            target = ids[:, 0] % 20
            loss = (
                F.nll_loss(logits, target)
                + F.multi_margin_loss(h, target)
                + F.kl_div(logits, h.detach().softmax(-1), reduction="batchmean")
            )
            sequences = logits.reshape(8, 8, 20)
            lengths = torch.full((8,), 8)
            loss = loss + F.ctc_loss(sequences, ids[:8, :3] % 19 + 1, lengths, torch.full((8,), 3))
            return (
                loss
                + F.huber_loss(h, h.detach().roll(1))
                + F.gumbel_softmax(h, hard=True).var()
                + F.cosine_embedding_loss(h, h.flip(0), torch.ones(64))
            )

    return train(Model(), [torch.randint(0, 64, (64, 9)) for _ in range(STEPS)], lambda m, x: m(x), scope)


@case()
def adaptive_optimizers(seed: int, scope: Scope) -> Record:
    """LBFGS calls the closure many times in a step; the learning rate is a tensor; gradients are clipped."""
    model, record = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)), Record()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)
    x = torch.randn(256, 32)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = (model(x).sigmoid() - x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        record.losses(loss.detach())
        return loss

    with scope():
        for _ in range(2):
            opt.step(closure)
    return record.ended(model)


@case()
def spectral_and_weight_norm(seed: int, scope: Scope) -> Record:
    """Parametrisations: spectral norm moves its buffers in forward, under no_grad, in place."""
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    model = nn.Sequential(
        spectral_norm(nn.Linear(32, 64)), nn.GELU(), weight_norm(nn.Linear(64, 32)), nn.Dropout(0.1), nn.Tanh()
    )
    return train(model, [torch.randn(128, 32) for _ in range(STEPS)], _mean_square, scope)


@case()
def ema_teacher(seed: int, scope: Scope) -> Record:
    """A teacher under no_grad whose weights are moved in place between forward and backward of the student."""
    student, teacher = MLP(depth=2), MLP(depth=2)
    opt, record = adamw(student), Record()
    with scope():
        for _ in range(STEPS):
            x = torch.randn(128, 32)
            opt.zero_grad()
            with torch.no_grad():
                target = teacher(x)
            loss = F.mse_loss(student(x) * target.sigmoid(), target)
            with torch.no_grad():
                for a, b in zip(teacher.parameters(), student.parameters(), strict=True):
                    a.lerp_(b, 0.1)
            loss.backward()
            opt.step()
            record.losses(loss.detach())
    del loss
    record.model(student)
    record.model(teacher, "teacher")
    record.rng()
    return record
