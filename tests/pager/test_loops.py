"""Plans without a backward: a turn of the program's loop is the period, and the tensors that the next one reads are
prefetched in its order."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import forkserver

from pager import loops


def alone(what: str) -> dict[str, Any]:
    """The result of a function of loops.py, in a process of its own."""
    done = forkserver.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(Path(loops.__file__)), what],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "MEMMGR_PAGER_SMALL": "16384", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_token_is_a_period_though_its_cache_grows() -> None:
    got = alone("token")
    assert got["same"] and got["within"]
    assert got["planned"] >= 7
    assert got["ahead"] >= loops.LAYERS // 4
    assert got["threads"] == []


def test_weights_that_stay_are_not_scanned() -> None:
    """Malloc's own order evicts the tensor that is used next; the plan keeps as many as fit and streams the rest."""
    got = alone("reads")
    assert 0 < got["planned"] < 0.8 * got["without"]


def test_what_is_no_turn_keeps_the_order_of_the_last_one() -> None:
    """A prompt between tokens has no plan, but touches the weights as they did: no more of them is read than has to be."""
    got = alone("prompts")
    assert got["same"] and got["followed"] == 0
    assert 0 < got["read"] < 0.75 * got["without"]


def test_an_evaluation_between_trainings() -> None:
    """Its batches are periods, and the training's own are found again behind it."""
    got = alone("evaluation")
    assert got["same"] and got["passes"] >= 12 + 12
    trained, evaluated, again = got["counts"]
    assert evaluated - trained >= 8
    assert again - evaluated >= 3


def test_loops_inside_of_a_pass_are_not_periods() -> None:
    got = alone("recurrent")
    assert got["same"]
    assert got["planned"] >= 3


def test_several_models_and_calls_that_fail() -> None:
    got = alone("several")
    assert got["same"]
    assert got["planned"] >= 4


def test_threads_that_call_the_same_model() -> None:
    assert alone("threads")["wrong"] == []


def test_a_turn_begins_where_the_program_does_most_between_two_ops() -> None:
    """The code that chooses the next token: so a new prompt begins with a turn, wherever the loop was found."""
    got = alone("alignment")
    assert got["first"] == got["most"] > 0.04


def test_a_loop_that_comes_back_has_its_plan_at_once() -> None:
    """Its turns begin where they did before, and the first of them names its weights as the last one did."""
    got = alone("returning")
    assert got["same"] and got["within"]
    for planned, ahead in got["between"][0::3]:
        assert planned >= 1 and ahead >= 2  # of two turns, one began with the ops in between
    for planned, ahead in got["between"][1::3]:
        assert planned == 3 and ahead >= 3


def test_a_pause_inside_of_a_turn_does_not_move_its_beginning() -> None:
    assert 0.015 < alone("hiccups")["first"] < 0.09
