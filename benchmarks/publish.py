"""docs/results made anew: a page per study from the runs of a store, and the table of the index.

    python -m benchmarks.publish --out runs              all studies whose runs are done; measurements are repeated
    python -m benchmarks.publish --out runs laziness     only these

The published runs lie in docs/results/runs.gz. They are unpacked into the store first, and packed from it at the end,
so that nothing needs to be trained again.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from completep.errors import UserError
from completep.files import write_over
from completep.report.charts import pictures
from completep.report.markdown import markdown
from completep.studies.design import Measurement, Sweep
from completep.studies.result import StudyResult
from completep.studies.run import known_studies, study, study_report
from completep.studies.scale import ScaleName
from completep.sweep.packing import pack, unpack
from completep.sweep.store import Store

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PACK = RESULTS / "runs.gz"
DESK: frozenset[str] = frozenset()  # studies that are published at desk scale; all others at laptop scale
BEGIN, END = "<!-- made by benchmarks/publish.py -->", "<!-- end -->"


def publish(name: str, out: Path) -> bool:
    """Write a study's page, if its runs are done: those of the grid, or else those that a bracketing search needs."""
    scale: ScaleName = "desk" if name in DESK else "laptop"
    chosen = known_studies()[name]
    try:
        if isinstance(chosen, Measurement):
            result = study(name, scale=scale, out=out)
        else:
            result = study_report(name, scale=scale, out=out)
            if result.verdict == "not finished" and isinstance(chosen, Sweep) and chosen.swept is not None:
                result = study_report(name, scale=scale, search="bracket", out=out)
    except UserError as error:
        print(f"{name}: {error.what}")
        return False
    print(f"{name}: {result.verdict}: {result.conclusion.sentence}")
    if result.verdict == "not finished":
        return False
    write_page(result, scale)
    return True


def write_page(result: StudyResult, scale: ScaleName) -> None:
    words = list(result.command)
    place = words.index("--out") if "--out" in words else len(words)
    result = replace(result, command=(*words[:place], *words[place + 2 :]))  # the store of a reader is elsewhere
    folder, document, frames = RESULTS / result.slug, result.document(), result.frames()
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    small = {name: frame for name, frame in frames.items() if name != "stream"}  # megabytes of raw numbers
    write_over(folder / "README.md", markdown(document, [f"{name}.csv" for name in small]))
    for figure in document.figures():
        write_over(folder / f"{figure.name}.svg", pictures(figure, ["svg"])["svg"])
    for name, frame in small.items():
        write_over(folder / f"{name}.csv", frame.write_csv())
    said = {key: value for key, value in result.to_json().items() if key != "table"}
    said |= {"scale": scale, "seeds": len(result.experiment.axes.get("seed", (0,)))}
    write_over(folder / "outcome.json", json.dumps(said, indent=1, ensure_ascii=False) + "\n")


def index() -> None:
    """The table of docs/results/README.md, from the pages there are."""
    rows = ["| study | the paper's claim | result here | scale, seeds |", "|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*/outcome.json")):
        said = json.loads(path.read_text())
        name, result = said["study"], f"**{said['agreement']}**: {said['sentence']}"
        cells = (f"[{name}]({name}/README.md)", said["claim"], result, f"{said['scale']}, {said['seeds']}")
        rows.append(f"| {' | '.join(cells)} |")
    page = RESULTS / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    write_over(page, "\n".join([before + BEGIN, "", *rows, "", END + after]))


def main(names: Sequence[str], out: Path) -> None:
    store = Store(out / "store")
    if PACK.exists():
        unpack(PACK, store)
    done = [publish(name, out) for name in names or known_studies()]
    if any(done):
        index()
    if any(store.root.glob("*/result.json")):
        PACK.unlink(missing_ok=True)
        print(f"{pack(store, PACK)} runs in {PACK.name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="studies; all by default")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="the folder with the store")
    given = parser.parse_args()
    main(given.names, given.out)
