"""A seeded schedule of faults, and every promise that must hold whatever happens: `python -m bench.simulator.schedule --seed N`.

A seed draws everything: how many routers and replicas, the real engine or the cost model, the requests, the faults. What
breaks a promise names the seed, and the command with that seed replays it event by event.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from bench.simulator.cost import Profile
from bench.simulator.fault import Fault, FaultKind
from bench.simulator.journey import Journey
from bench.simulator.setup import Setup
from bench.simulator.trace import TraceRequest
from bench.simulator.world import Layout, World
from replica.contract.blocks import block_keys, root_key
from replica.contract.messages import FinishReason, StepTimeCoefficients
from replica.mock_runner import mock_token
from router.config import RouterConfig

SECONDS = 8.0  # of arrivals and faults
STARVED_S = 60.0  # after the last arrival everybody has ended
_REST_S = 3.0  # cancels and last frames arrive
_SMALL = Profile(
    step_time=StepTimeCoefficients(a=0.008, b=1 / 4_000, c=0.001, d=2e-6),
    max_num_batched_tokens=256,
    max_num_seqs=8,
    block_size=16,
    cache_blocks=120,
    pool_blocks=160,
    max_model_len=1_024,
    step_slo_s=0.1,
)
_ROUTER = RouterConfig(
    queue_time_slo_s=10.0, queue_depth_max=24, queue_tokens_max=8_000, prefix_index_bytes_max=32_768, drain_timeout_s=1.0
)


@dataclass(frozen=True, slots=True)
class Schedule:
    setup: Setup
    requests: tuple[TraceRequest, ...]
    faults: tuple[Fault, ...]


def draw(seed: int) -> Schedule:
    random = Random(seed)
    replicas, routers = random.choice((1, 2, 3, 3, 4)), random.choice((1, 1, 1, 2))
    kv = random.choice(("free", "production"))
    setup = Setup(
        layout=Layout(replicas=replicas, routers=routers, delay_s=random.choice((0.0, 0.001, 0.02)), seed=seed, keeps_tokens=True),
        profile=_SMALL,
        router=_ROUTER.model_copy(update={"queue_time_slo_s": random.choice((0.3, 2.0, 10.0))}),
        admission=True,
        kv="production" if kv == "production" else "free",
        told=random.choice((1.0, 1.0, 0.5, 3.0)),
        noise=random.choice((0.0, 0.0, 0.3)),
        checks=True,
    )
    root = root_key(model="simulated", revision="")
    requests = sorted((_request(random, root) for _ in range(random.randrange(5, 50))), key=lambda one: one.arrival_s)
    faults = sorted((_fault(random) for _ in range(random.randrange(6))), key=lambda one: one.at_s)
    return Schedule(setup, tuple(requests), tuple(faults))


def _request(random: Random, root: bytes) -> TraceRequest:
    family, shared, own = random.randrange(6), random.randrange(0, 200), random.randrange(1, 60)
    prompt = tuple((family * 7_919 + i * 17) % 40_000 for i in range(shared)) + tuple(random.randrange(40_000) for _ in range(own))
    keys = block_keys(root, prompt, _SMALL.block_size)
    return TraceRequest(random.random() * SECONDS, len(prompt), random.randrange(1, 80), keys, prompt_ids=prompt)


def _fault(random: Random) -> Fault:
    kind = random.choice(tuple(FaultKind))
    amounts = {
        FaultKind.SLOW: random.choice((3.0, 20.0)),
        FaultKind.LATE: random.random(),
        FaultKind.JUMP: random.choice((0.4, 5.0, 3600.0)),
    }
    return Fault(
        at_s=random.random() * SECONDS,
        kind=kind,
        replica=random.randrange(4),
        router=random.randrange(2),
        lasts_s=random.choice((0.05, 0.5, 3.0, 8.0)),
        amount=amounts.get(kind, 1.0),
    )


def broken_promises(seed: int) -> list[str]:
    """What went wrong under this seed; empty if all is well."""
    schedule = draw(seed)
    world = schedule.setup.world()
    try:
        world.run(schedule.requests, schedule.faults, limit_s=STARVED_S)
        world.settle(_REST_S)
        for station in world.stations:
            if station.is_alive and not station.replica.is_stepping:
                station.replica.check()
    except (AssertionError, LookupError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        return [f"at {world.agenda.now:.3f} s: {type(error).__name__}: {error}"]
    return [*_of_journeys(world, schedule), *_of_routers(world, schedule), *_of_replicas(world)]


def _of_journeys(world: World, schedule: Schedule) -> Iterator[str]:
    for journey in world.journeys:
        name = f"request {journey.number}"
        if journey.ends != 1:
            yield f"{name} ended {journey.ends} times" + (", starved" if journey.ends == 0 else "")
            continue
        tokens = journey.tokens or []
        if tokens != expected(journey, schedule)[: len(tokens)]:
            yield f"{name}: a token was lost, doubled or another's"
        if journey.is_cancelled:
            continue
        outcomes = len(journey.finishes) + (journey.rejected is not None)
        if outcomes != 1:
            yield f"{name} has {outcomes} outcomes"
        if journey.rejected is not None and tokens:
            yield f"{name} was refused after its first token"
        if journey.finishes == [FinishReason.LENGTH] and len(tokens) != journey.request.output_tokens:
            yield f"{name} says it is complete with {len(tokens)} of {journey.request.output_tokens} tokens"
        if journey.finishes not in ([], [FinishReason.LENGTH], [FinishReason.ERROR]):
            yield f"{name} ended as {journey.finishes}"


def expected(journey: Journey, schedule: Schedule) -> list[int]:
    """What the undisturbed run says: a function of seed, choice and position."""
    vocabulary = schedule.setup.profile.limits().vocab_size
    request = journey.request
    tokens = []
    for position in range(request.prompt_tokens, request.prompt_tokens + request.output_tokens):
        token = mock_token(journey.number, 0, position, vocabulary)
        tokens.append(token + 1 if token == 2 and schedule.setup.kv == "production" else token)
    return tokens


def _of_routers(world: World, schedule: Schedule) -> Iterator[str]:
    config = schedule.setup.router
    for site in world.sites:
        board, name = site.board, f"router {site.number}"
        traffic, fleet, tally = board.traffic, board.fleet, board.traffic.tally
        left = {
            "dispatches": len(traffic.dispatches),
            "attempts": len(traffic.attempts),
            "leases": sum(known.view.own for known in fleet.all()),
            "hits to come": fleet.index.coming,
            "queued": len(board.reception.queue),
            "journeys": len(site.journeys),
        }
        yield from (f"{name}: {count} {what} are left" for what, count in left.items() if count)
        if tally.arrived != tally.ended:
            yield f"{name}: {tally.arrived} arrived, {tally.ended} ended"
        if fleet.index.entries * 240 > config.prefix_index_bytes_max:
            yield f"{name}: the prefix index holds {fleet.index.entries} entries"
        if site.queue_depth_max > config.queue_depth_max:
            yield f"{name}: {site.queue_depth_max} waited at once"


def _of_replicas(world: World) -> Iterator[str]:
    for station in world.stations:
        if not station.is_alive or station.is_hung:
            continue
        if station.replica.holds:
            yield f"{station.name} still holds {station.replica.holds} requests"
        load = station.replica.load()
        if load.running or load.waiting or load.context_tokens:
            yield f"{station.name} reports {load.running} running, {load.waiting} waiting"


def run(first: int, count: int) -> int:
    """Seeds first … first + count − 1; how many failed. Says which, and how to replay them."""
    failed = 0
    began_s = time.monotonic()
    for seed in range(first, first + count):
        for number, promise in enumerate(broken_promises(seed)):
            failed += number == 0
            print(f"seed {seed}: {promise}")
            if number == 0:
                print(f"  replay: {replay(seed)}")
    print(f"{count} schedules, {failed} failed, {time.monotonic() - began_s:.0f} s")
    return failed


def replay(seed: int) -> str:
    return f"python -m bench.simulator.schedule --seed {seed} --count 1"


def main() -> None:
    parser = argparse.ArgumentParser(description="Seeded fault schedules against the production router and engine.")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=2000)
    asked = parser.parse_args()
    sys.exit(1 if run(asked.seed, asked.count) else 0)


if __name__ == "__main__":
    main()
