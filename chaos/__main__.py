"""The command: bout after bout, the fleet, the report. Ends with 1 if anything was lost, doubled, stale or stuck."""

from __future__ import annotations

import argparse
import datetime
import math
import random
import signal
import sys
import time
from pathlib import Path

from . import fleet as fleets
from . import report
from .bout import Result, fight
from .check import KINDS
from .crew import ROOT
from .faults import Fault
from .figures import Figures
from .plan import LONG, QUICK, Plan
from .stage import Ground, ground

OUT = Path(__file__).parent / "out"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="every fault once or twice, into chaos/out")
    parser.add_argument("--faults", help="only those with one of these words in their name: kill,sqlite")
    parser.add_argument("--times", type=int, help="how often each is injected")
    parser.add_argument("--rows", type=int, help="rows of each bout")
    parser.add_argument("--no-fleet", action="store_true", help="leave out the several hosts")
    parser.add_argument("--only-fleet", action="store_true", help="nothing but the several hosts")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further bout after that long")
    parser.add_argument("--seed", type=int, default=None, help="of what is chosen by chance")
    parser.add_argument("--merge", action="store_true", help="keep the last run's figures of what this one leaves out")
    parser.add_argument(
        "--out", type=Path, help="the report (docs/explanation/chaos.md; where only a part is run: chaos/out)"
    )
    return parser.parse_args()


def main() -> int:
    given = arguments()
    random.seed(given.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is taken down again
    plan = QUICK if given.quick else LONG
    whole = not (given.quick or given.faults or given.times or given.rows or given.no_fleet or given.only_fleet)
    out = given.out or (ROOT / "docs" / "explanation" / "chaos.md" if whole or given.merge else OUT / "chaos.md")
    began, when = time.monotonic(), datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    limited = "" if math.isinf(given.minutes) else f' ARGS="--minutes {given.minutes:g}"'
    command = f"make chaos{limited}" if whole else " ".join(["python -m chaos", *sys.argv[1:]])
    kept = OUT / "chaos.json"
    figures = Figures.read(kept) if given.merge else Figures()
    results: list[Result] = []
    fleet: fleets.Fleet | None = None
    with ground() as here:
        versions = report.versions(here.server.version())

        def tell(*new: Result) -> None:
            """After every bout: a run that is broken off has told what it found until then."""
            for result in new:
                result.origin = f"`{command}`, {when}"
            report.write(out, figures, versions)
            figures.write(kept)

        for kind in [] if given.only_fleet else plan.wanted(given.faults):
            if time.monotonic() - began > given.minutes * 60:
                result = Result(kind.name, kind.says, not_tried=f"the {given.minutes:g} minutes given were over")
            else:
                result = _bout(kind(here), given.times or plan.times[kind], given.rows or plan.rows)
            results.append(result)
            figures.results[result.fault] = result
            tell(result)
        if not (given.no_fleet or given.faults):
            figures.fleet = fleet = _fleet(here, plan)
            tell(fleet.drained)
    print(out.read_text())
    return 1 if failings(results, fleet) else 0


def _bout(fault: Fault, times: int, rows: int) -> Result:
    try:
        return fight(fault, times, rows)
    except Exception as error:  # told in the report, and the others are tried all the same
        print(f"{fault.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if not fault.ground.server.running:
            fault.ground.server.start()
        return _broken(fault.name, fault.says, error)


def _broken(name: str, says: str, error: Exception) -> Result:
    """A bout that did not come to its end counts as rows that did not."""
    result = Result(name, says)
    result.verdict.say("stuck", 0, f"the bout did not end: {type(error).__name__}: {error}")
    return result


def _fleet(here: Ground, plan: Plan) -> fleets.Fleet:
    try:
        return fleets.run(here, plan.hosts, plan.each, plan.fleet_rows, plan.idle, plan.idle_seconds)
    except Exception as error:
        return fleets.Fleet(_broken("the fleet", "several hosts", error))


def failings(results: list[Result], fleet: fleets.Fleet | None) -> list[str]:
    """What makes the run fail, told on standard error."""
    words = [f"{result.fault}: {kind}" for result in results for kind in KINDS if result.verdict.found[kind]]
    words += [f"{result.fault}: it was not felt: {result.unfelt}" for result in results if result.unfelt]
    words += [
        f"{result.fault}: {result.verdict.from_living} rows were taken from live workers"
        for result in results
        if result.spares and result.verdict.from_living
    ]
    words += fleet.faults if fleet is not None and fleet.drained.not_tried is None else []
    for word in words:
        print(f"chaos: {word}", file=sys.stderr)
    return words


if __name__ == "__main__":
    sys.exit(main())
