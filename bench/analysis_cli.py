"""The commands of `rantang bench` that sweep, choose, explain, compare and draw. Whatever is heavy is imported inside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.each_once import EachOnce
from bench.hours import HOURS_MAX
from bench.usage import usage_errors

if TYPE_CHECKING:
    from bench.server import ServerOptions

OF_READING = {"read", "load", "slo", "price_per_hour"}  # what `choose --read` looks at
SLO_DEFAULT = "ttft_ms=2000,itl_p95_ms=200"

WorkloadName = Annotated[str, typer.Option("--workload", "-w", help="A name, see `workloads`, or a trace file.")]
SloText = Annotated[str, typer.Option("--slo", help="Targets of a response: ttft_ms, itl_p95_ms, tpot_ms, e2e_ms; queue_ms of the run.")]
Rates = Annotated[str, typer.Option(help="Requests per second, such as 0.5,1,2; auto finds them from a burst.")]
Requests = Annotated[int | None, typer.Option(help="How many; of a trace, its first. The same at every rate.")]
Repeats = Annotated[int, typer.Option(help="Runs at each load; three or more tell how far they spread.")]
Seed = Annotated[int, typer.Option(help="Of lengths and arrivals.")]
Refinements = Annotated[int, typer.Option(help="With auto: at most so many more loads around the knee.")]
Burst = Annotated[bool, typer.Option("--burst/--no-burst", help="Also send the whole trace at once; auto needs it.")]
Price = Annotated[float | None, typer.Option(help="Of one replica, for the cost per accepted response.")]
Url = Annotated[str | None, typer.Option(help="A running OpenAI-compatible server; without it a stack is started.")]
Model = Annotated[str | None, typer.Option(help="Name to ask for; the server's first unless given.")]
ApiKey = Annotated[str, typer.Option(envvar=["RANTANG_API_KEY", "OPENAI_API_KEY"], help="Bearer token.")]
Replicas = Annotated[
    int | None, typer.Option(help="Of the stack that is started: 1; at a URL, for the cost: as many as the server says, else 1.")
]
ReplicasStarted = Annotated[int | None, typer.Option("--replicas", help="Of each stack that is started: 1 unless given.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of every stack.")]
TextPrompts = Annotated[bool, typer.Option("--text-prompts", help="For servers that take no token ids.")]
NoIds = Annotated[bool, typer.Option("--no-ids", help="Do not ask for token ids in the answer.")]
TimeoutS = Annotated[float, typer.Option(help="Of one request.")]
MaxHours = Annotated[float, typer.Option(help="What takes longer by its arrivals alone is refused.")]
LengthScale = Annotated[float, typer.Option(help="Of a trace's lengths.")]
ContextTokens = Annotated[int, typer.Option(help="Longer requests of a trace are cut to it.")]
Wanted = Annotated[float | None, typer.Option(help="Accepted responses per second that are wanted; else each is judged at its knee.")]
Read = Annotated[list[Path] | None, typer.Option(metavar="RESULT", help="Weigh finished sweeps instead of running any.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--change", metavar="NAME=VALUE[,…]", help="A configuration beside the baseline; replicas=2 is one too."),
]
Restart = Annotated[bool, typer.Option("--restart", help="Throw away what an interrupted sweep has finished.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the results; bench/results unless given.")]
ResultPath = Annotated[Path, typer.Argument(metavar="RESULT", help="A result file (JSON).")]


def add_to(app: typer.Typer) -> None:
    for command in (sweep, choose, ladder, explain, compare, report):
        app.command(cls=EachOnce)(command)


def sweep(
    *,
    workload: WorkloadName = "chat",
    slo: SloText = SLO_DEFAULT,
    rates: Rates = "auto",
    requests: Requests = None,
    repeats: Repeats = 1,
    seed: Seed = 0,
    length_scale: LengthScale = 1.0,
    context_tokens: ContextTokens = 8192,
    refinements: Refinements = 3,
    burst: Burst = True,
    price_per_hour: Price = None,
    url: Url = None,
    model: Model = None,
    api_key: ApiKey = "",
    replicas: Replicas = None,
    settings: Settings = None,
    text_prompts: TextPrompts = False,
    no_ids: NoIds = False,
    timeout_s: TimeoutS = 600.0,
    max_hours: MaxHours = HOURS_MAX,
    restart: Restart = False,
    out: Out = None,
) -> None:
    """The same trace at rates from below the expected load to saturation; the knee. Goes on where it was interrupted."""
    from bench.analysis.slo_text import parse_slo
    from bench.out_folder import check_folder
    from bench.result import RESULTS
    from bench.sweep.carry_out import begin
    from bench.sweep.plan import SweepOptions, plan_sweep
    from bench.sweep_command import sweep as run
    from bench.traces import Fit

    with usage_errors():
        server = _server(url, model, api_key, replicas, settings, (text_prompts, no_ids, timeout_s))
        options = SweepOptions(
            workload, parse_slo(slo), server, rates, requests, repeats, seed, refinements, burst, price_per_hour,
            folder=out or RESULTS, max_hours=max_hours, fit=Fit(length_scale, context_tokens),
        )  # fmt: skip
        plan = plan_sweep(options)
        check_folder(options.folder)
        state = begin(plan, restart=restart)
    raise typer.Exit(run(plan, state))


def choose(
    context: typer.Context,
    *,
    slo: SloText = SLO_DEFAULT,
    load: Wanted = None,
    read: Read = None,
    changes: Changes = None,
    workload: WorkloadName = "chat",
    rates: Rates = "auto",
    requests: Requests = None,
    repeats: Repeats = 1,
    seed: Seed = 0,
    length_scale: LengthScale = 1.0,
    context_tokens: ContextTokens = 8192,
    refinements: Refinements = 2,
    price_per_hour: Price = None,
    replicas: Replicas = None,
    settings: Settings = None,
    url: Url = None,
    model: Model = None,
    api_key: ApiKey = "",
    text_prompts: TextPrompts = False,
    no_ids: NoIds = False,
    timeout_s: TimeoutS = 600.0,
    max_hours: MaxHours = HOURS_MAX,
    restart: Restart = False,
    out: Out = None,
) -> None:
    """The configuration that keeps the SLO at the least cost per accepted response, and why the others lost."""
    from bench import choose_command
    from bench.analysis.choice import Demand
    from bench.analysis.slo_text import parse_slo
    from bench.console import new_console
    from bench.out_folder import check_folder
    from bench.result import RESULTS
    from bench.sweep.plan import SweepOptions
    from bench.traces import Fit

    with usage_errors():
        targets = parse_slo(slo)
        demand = Demand(targets, load, 1.0 if price_per_hour is None else price_per_hour)
        priced = price_per_hour is not None
        if read:
            sources = {name: context.get_parameter_source(name) for name in context.params}
            given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
            if unread := sorted(set(given) - OF_READING):
                raise ValueError(f"finished sweeps are read, or configurations swept: {', '.join(unread)} says nothing with --read")
            asked = targets if "slo" in given else None
            raise typer.Exit(choose_command.choose_from_files(read, demand, new_console(), priced=priced, asked=asked))
        server = _server(url, model, api_key, replicas, settings, (text_prompts, no_ids, timeout_s))
        base = SweepOptions(
            workload, targets, server, rates, requests, repeats, seed, refinements, True, price_per_hour,
            folder=out or RESULTS, max_hours=max_hours, fit=Fit(length_scale, context_tokens),
        )  # fmt: skip
        plans = choose_command.plans_of(base, changes or ())
        check_folder(base.folder)
        states = choose_command.begin_all(plans, restart=restart)
    raise typer.Exit(choose_command.choose_by_sweeps(plans, states, demand, new_console(), priced=priced))


def ladder(
    *,
    workload: WorkloadName = "mix",
    slo: SloText = SLO_DEFAULT,
    streams: Annotated[int | None, typer.Option(help="Closed loop of so many clients; 16 unless a rate is given.")] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second.")] = None,
    requests: Requests = None,
    repeats: Repeats = 1,
    seed: Seed = 0,
    replicas: ReplicasStarted = None,
    settings: Settings = None,
    timeout_s: TimeoutS = 1800.0,
    max_hours: MaxHours = HOURS_MAX,
    out: Out = None,
) -> None:
    """Static batching, iteration-level FCFS, + chunked prefill, + prefix caching, + our scheduler: the gain of each step."""
    from bench import ladder_command
    from bench.analysis.slo_text import parse_slo
    from bench.console import new_console
    from bench.load import Load
    from bench.out_folder import check_folder
    from bench.result import RESULTS

    with usage_errors():
        server = _server(None, None, "", replicas, settings, (False, False, timeout_s))
        offered = Load(streams=streams if streams is not None or rate is not None else 16, rate_per_s=rate)
        folder = out or RESULTS
        options = ladder_command.LadderOptions(workload, parse_slo(slo), offered, server, requests, repeats, seed, folder, max_hours)
        plan = ladder_command.plan_ladder(options)
        check_folder(options.folder)
    raise typer.Exit(ladder_command.ladder(plan, new_console()))


def explain(result: ResultPath) -> None:
    """Name what held each measured load back, with the evidence."""
    from bench.console import new_console
    from bench.explain_command import explain as run

    with usage_errors():
        raise typer.Exit(run(result, new_console()))


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A result file (JSON).")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The one that is compared with it.")],
    metrics: Annotated[str, typer.Option(help="Names, separated by commas; see `metrics`. All unless given.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Compare different workloads or loads all the same.")] = False,
) -> None:
    """For each figure, whether the difference of two results exceeds the spread of their runs."""
    from bench.compare_command import compare_results
    from bench.console import new_console

    with usage_errors():
        names = [name.strip() for name in metrics.split(",") if name.strip()]
        raise typer.Exit(compare_results(a, b, names, new_console(), force=force))


def report(result: ResultPath) -> None:
    """Plots of a result (PNG, SVG) and one self-contained HTML report, beside it."""
    from bench.console import new_console
    from bench.report_command import can_draw
    from bench.report_command import report as run
    from bench.run_command import tell_paths

    console = new_console()
    with usage_errors():
        tell_paths(run(result, console), console)
    raise typer.Exit(0 if can_draw() else 1)


def _server(
    url: str | None, model: str | None, api_key: str, replicas: int | None, settings: Sequence[str] | None, rest: tuple[bool, bool, float]
) -> ServerOptions:
    """`rest`: text prompts, no ids, time limit of a request."""
    from bench.server import ServerOptions, setting_of

    text_prompts, no_ids, timeout_s = rest
    given = dict(setting_of(text) for text in settings or ())
    count = 1 if replicas is None else replicas
    return ServerOptions(url, model, api_key, count, given, text_prompts, not no_ids, timeout_s=timeout_s, ask_replicas=replicas is None)
