"""PyTorch's distributed tests, as its wheel brings them, over gloo.

A rank is a forked process, in which the test runs in a budget of its own. It writes its entries to a file that the parent
adds to the test's.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

from foreign.plugin import recorded
from foreign.recorder import RECORDER

IN_RANKS = True
RANKS_FOLDER = "FOREIGN_RANKS"


class TestGloo(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._entries = tempfile.TemporaryDirectory()
        os.environ[RANKS_FOLDER] = self._entries.name
        self._spawn_processes()

    def tearDown(self) -> None:
        super().tearDown()
        for file in sorted(Path(self._entries.name).iterdir()):
            entries, evicted = json.loads(file.read_text())
            RECORDER.entries += [f"rank {file.name} {entry}" for entry in entries]
            RECORDER.evicted += evicted
        self._entries.cleanup()

    def _spawn_processes(self) -> None:
        """Forked: the parent has no budget and no threads of its own, and the imports take longer than the tests."""
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        test = getattr(self, test_name)

        def in_budget() -> None:
            try:
                with recorded(test_name):
                    test()
            finally:
                found = json.dumps([RECORDER.entries, RECORDER.evicted])
                Path(os.environ[RANKS_FOLDER], str(self.rank)).write_text(found)

        setattr(self, test_name, in_budget)
        super().run_test(test_name, parent_pipe)
