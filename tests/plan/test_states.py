"""ZeRO-Offload, ZeRO-Infinity, PatrickStar and L2L act as their papers describe, are judged, and are never faster than
the plan."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memmgr.policies.plan.paging import least_seconds
from memmgr.policies.plan.planner import plan
from memmgr.policies.published.patrickstar import Chunked, chunked, packed, patrickstar
from memmgr.policies.published.streaming import l2l, layers, relay, zero_infinity, zero_offload
from memmgr.policies.simulate.cycle import RESIDENT, Cycle
from memmgr.policies.simulate.simulator import Run
from memmgr.policies.trace import Op, OpKind, Storage, TierLink, Trace
from memmgr.policies.trace.blocks import Program, Role, plain, program_of, roles, spent, step_end
from memmgr.policies.trace.schedule import Do, Step, replay

from .judge import judged
from .test_paging import LINK, Training

Policy = Callable[[Trace, int, TierLink | None], Run]
POLICIES: list[Policy] = [zero_offload, zero_infinity, patrickstar, l2l]
LAYERS = 6


SIZES = [9, 4, 8, 4, 8, 4, 8, 5]
"""An embedding, three blocks of two matrices each, a head."""


def stack() -> Trace:
    return Training(len(SIZES), sizes=SIZES).trace()


def program(trace: Trace) -> Program:
    return program_of(trace, plain(trace))


def block_of(p: Program) -> dict[int, int]:
    """By storage. A gradient's block has taken over that of its end."""
    return {s: k for k, b in sorted(enumerate(p.blocks), key=lambda kb: kb[1].held) for _, s in b.versions}


def residents(trace: Trace, made: Run, p: Program) -> list[set[int]]:
    """For each event, the blocks that are resident while it runs, by the steps alone."""
    block = block_of(p)
    there = {k for s, k in p.begins.items() if s not in made.away}
    found = []
    for step in made.steps:
        if step.do in (Do.RELOAD, Do.FREE):
            (there.add if step.do is Do.RELOAD else there.discard)(block[step.target])
        elif step.do is Do.COMPUTE and trace.ops[step.target].kind is not OpKind.CONSTANT:
            there |= {block[s] for s in trace.ops[step.target].outputs}
            found.append(set(there))
    return found


def of(p: Program, *which: Role) -> set[int]:
    return {k for k, kind in enumerate(roles(p)) if kind in which}


def test_kinds_are_told_from_who_changes_and_touches_what() -> None:
    trace = Training(LAYERS).trace()
    p = program(trace)
    which = [roles(p)[p.begins[s]] for _, s in trace.cycle]
    assert which == [Role.PARAMETER] * LAYERS + [Role.STATE] * LAYERS + [Role.GRADIENT] * LAYERS
    assert roles(p).count(Role.ACTIVATION) == len(p.blocks) - 3 * LAYERS
    assert step_end(p) == LAYERS - 1 and p.turn == 2 * LAYERS
    blind = program(replace(trace, backward_at=None))
    assert blind.turn is None and not of(blind, Role.GRADIENT)


def test_a_gradient_is_spent_after_its_step() -> None:
    trace = Training(2).trace()
    p = program(trace)
    gradients = of(p, Role.GRADIENT)
    assert [spent(p)[event] & gradients for event in (0, 1)] == [{p.begins[s]} for _, s in trace.cycle[-2:]]


def test_a_gradient_that_is_set_to_zero_after_forward_does_not_make_forward_the_step() -> None:
    """`zero_grad(set_to_none=False)` between the loss and its backward."""
    c = OpKind.CONSTANT
    ops = (
        Op("constant", 0.0, (), (0,), c), Op("constant", 0.0, (), (1,), c), Op("constant", 0.0, (), (2,), c),
        Op("step", 1.0, (0, 1, 2), (3, 4), OpKind.ONCE, ((0, 3), (1, 4))),
        Op("forward", 1.0, (3,), (5,)), Op("zero_", 1.0, (2,), (6,), OpKind.ONCE, ((2, 6),)),
        Op("backward", 1.0, (5, 6), (7,), OpKind.ONCE, ((6, 7),)),
    )  # fmt: skip
    ends = {0: 4, 1: 4, 2: 6, 6: 7, 5: 7}
    storages = tuple(
        Storage(f"s{s}", 4, next(k for k, op in enumerate(ops) if s in op.outputs), **({"released": ends[s]} if s in ends else {}))
        for s in range(8)
    )  # fmt: skip
    trace = Trace(ops, storages, "cpu", 6, (LINK,), copy_on_write=False, cycle=((3, 0), (4, 1), (7, 2))).check()
    p = program(trace)
    assert [roles(p)[p.begins[s]] for s in (0, 1, 2)] == [Role.PARAMETER, Role.STATE, Role.GRADIENT]
    assert step_end(p) == 0


def test_layers_are_what_repeats() -> None:
    trace = stack()
    p = program(trace)
    parameters = [p.begins[s] for _, s in trace.cycle[: len(SIZES)]]
    found = layers(trace, p)
    assert [found[k] for k in parameters] == [0, 1, 1, 3, 3, 5, 5, 7]


def test_zero_offload_streams_states_and_keeps_the_rest() -> None:
    trace = Training(LAYERS, seed=2).trace()
    p = program(trace)
    budget = trace.unmanaged_peak[0]
    made = zero_offload(trace, budget, LINK)
    states, end = of(p, Role.STATE), step_end(p)
    gone: set[int] = set()
    for event, there in enumerate(residents(trace, made, p)):
        gone |= set().union(*p.died[:event]) & of(p, Role.GRADIENT)
        assert of(p, Role.PARAMETER) <= there
        own = states.intersection(p.touched[event])
        if event <= end:  # the tile at hand, the one before on its way out, the next on its way in
            assert own <= there and len(there & states) <= 3
    sizes = sum(p.blocks[k].size for k in states)
    moved = {do: [s for s in made.steps if s.do is do] for do in (Do.OFFLOAD, Do.RELOAD)}
    assert made.moved_bytes == 2 * sizes and all(len(those) == len(states) for those in moved.values())
    block = block_of(p)
    assert {block[step.target] for those in moved.values() for step in those} == states


def test_zero_infinity_reads_in_the_traced_order() -> None:
    trace = Training(LAYERS, seed=4).trace()
    p = program(trace)
    made = zero_infinity(trace, trace.unmanaged_peak[0], LINK)
    block = block_of(p)
    uses: list[int] = []  # of each read, the event that it is for
    event = -1
    for step in made.steps:
        if step.do is Do.COMPUTE and trace.ops[step.target].kind is not OpKind.CONSTANT:
            event += 1
        elif step.do is Do.RELOAD:
            touches = p.blocks[block[step.target]].touches
            uses.append(next((t for t in touches if t > event), touches[0] + len(p.steps)))
            assert uses[-1] - event <= 4  # three operators ahead of the next one
    assert uses == sorted(uses) and any(use - event > 1 for use in uses)
    states = of(p, Role.PARAMETER, Role.STATE, Role.GRADIENT)
    most = max(len(there & states) for there in residents(trace, made, p))
    assert most < len(states)


def test_l2l_has_one_layer_and_the_next() -> None:
    trace = stack()
    p = program(trace)
    layer = layers(trace, p)
    visits = relay(p, layer, of(p, Role.PARAMETER, Role.STATE, Role.GRADIENT))
    assert (
        len(visits) == len(SIZES) + 5 + 4
    )  # the step by parameter, forward and back by layer, which turns in the head
    tight = l2l(trace, 1, LINK).least_bytes
    for budget in (tight, trace.unmanaged_peak[0]):
        made = l2l(trace, budget, LINK)
        assert judged(trace, made, budget, LINK).valid
        for event, there in enumerate(residents(trace, made, p)):
            if event > step_end(p):
                here = {layer[k] for k in there if k in layer}
                assert len(here) <= 3  # and the one before, which is being written
                own = {layer[k] for k in p.touched[event] if k in layer}
                assert all(k in there for k, number in layer.items() if number in own)  # whole
    assert l2l(trace, tight, LINK).moved_bytes >= made.moved_bytes


def test_patrickstars_chunks_have_one_size_and_one_kind() -> None:
    trace = Training(12, seed=5).trace()
    p = program(trace)
    size, chunks = chunked(p)
    which = roles(p)
    assert sorted(k for chunk in chunks for k in chunk) == sorted(of(p, Role.PARAMETER, Role.STATE, Role.GRADIENT))
    for chunk in chunks:
        assert sum(p.blocks[k].size for k in chunk) <= size
        assert len({which[k] for k in chunk}) == 1
    assert packed({0: 4, 1: 3, 2: 5, 3: 1}, 8) == [[0, 1], [2, 3]]


def test_patrickstar_evicts_the_chunk_that_is_used_last() -> None:
    trace = Training(12, seed=5).trace()
    p = program(trace)
    budget = int(trace.unmanaged_peak[0] * 0.6)
    seen = []

    class RunState(Chunked):
        def leave(self, k: int, event: int) -> None:
            c = self.chunk_of[k]
            at_hand = {self.chunk_of[other] for other in self.wanted[event] if other in self.chunk_of}
            uses = {
                other: min(self.next[one] for one in self.chunks[other] if self.state[one] == RESIDENT)
                for other in self.there - at_hand
            }
            seen.append(c)
            if self.state[self.chunks[c][0]] == RESIDENT:  # the whole of it is there still
                assert c not in at_hand and uses[c] == max(uses.values())
            super().leave(k, event)
            assert self.used <= self.budget

    passes: Cycle = RunState(p, budget, LINK)
    for _ in range(3):
        passes.play()
        assert passes.used == passes.bytes_of(k for k, s in enumerate(passes.state) if s == RESIDENT)
    assert len(set(seen)) > 1


@given(st.integers(1, 10), st.integers(0, 50), st.floats(0.0, 1.0), st.sampled_from([50.0, 1000.0, 1e6]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_judge_accepts_all_and_none_is_below_the_bound(
    depth: int, seed: int, share: float, rate: float, shared: bool
) -> None:
    trace = Training(depth, seed).trace()
    link = TierLink("disk", rate, rate, shared=shared)
    for policy in POLICIES:
        least = policy(trace, 1, link).least_bytes
        budget = int(least + share * max(trace.unmanaged_peak[0] - least, 0))
        made = policy(trace, budget, link)
        assert made.feasible and made.least_bytes == least
        cost = judged(trace, made, budget, link)
        assert cost.valid, cost.why
        assert cost.peak_bytes <= budget
        bound = least_seconds(trace, budget, link) * (1 - 1e-9)
        assert cost.seconds >= bound and made.seconds >= bound
        below = policy(trace, least - 1, link)
        assert not below.feasible and str(least) in below.why and not below.steps


@pytest.mark.parametrize("seed", [1, 3])
@pytest.mark.parametrize("share", [0.75, 0.5, 0.35])
def test_no_published_one_is_faster_than_the_plan(seed: int, share: float) -> None:
    trace = Training(24, seed).trace()
    budget = int(trace.unmanaged_peak[0] * share)
    ours = plan(trace, budget, link=LINK, effort=20_000)
    mine = replay(
        trace, ours.steps, budget, write_rate=1000.0, read_rate=1000.0, shared=True, away=ours.away, clean=ours.clean
    )
    assert mine.valid and mine.seconds >= ours.bound_seconds * (1 - 1e-9)
    for policy in POLICIES:
        made = policy(trace, budget, LINK)
        if made.feasible:
            assert mine.seconds <= judged(trace, made, budget, LINK).seconds * (1 + 1e-9), made.policy


def test_without_a_cycle_or_a_tier_it_says_so() -> None:
    trace = Training(3).trace()
    for policy in POLICIES:
        assert "tier" in policy(trace, 1000, None).why
        assert "cycle" in policy(replace(trace, cycle=()), 1000, LINK).why


def test_what_the_link_has_not_done_takes_its_time_in_the_next_pass() -> None:
    """A pass that leaves a write of 5 s behind: an op that changes these bytes in the next one waits for it."""
    c = OpKind.CONSTANT
    ops = (Op("constant", 0.0, (), (0,), c), Op("op", 1.0, (0,), (1,), OpKind.ONCE, ((0, 1),)), Op("op", 1.0, (), ()))
    storages = (Storage("a", 10, 0, 2), Storage("b", 10, 1))
    trace = Trace(ops, storages, copy_on_write=False, cycle=((1, 0),)).check()
    steps = [Step(Do.COMPUTE, 0), Step(Do.COMPUTE, 1), Step(Do.COMPUTE, 2), Step(Do.OFFLOAD, 1)]
    cost = replay(trace, steps, 10, write_rate=2.0, read_rate=2.0, clean=(0,))
    assert cost.valid and cost.seconds == pytest.approx(7.0)
