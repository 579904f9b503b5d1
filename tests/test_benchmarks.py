"""`benchmarks/run`: a smoke run of its parts, what becomes of one that fails, and the figures of the README."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import msgspec
import parts
import programs
import pytest
import report as reports
from curves import log_log
from figures import Curve, Figure, Found, named, of_programs, of_starts, of_starts_on_a_gpu
from machine import differing
from parts import Call, Context, Planned, UnmeasuredError, measured
from report import Part, Report

from tests.machines import wait_for

pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent
COMMITTED = ROOT / "benchmarks" / "report"
MEASURED_ANYWHERE = {"startup", "layers", "growth"}


def context(place: Path) -> Context:
    return Context(place, quick=True, trees=None, peers=None, b10=None, vllm=None, model=None)


def planned(place: Path, script: str, limit: float = 60.0) -> Planned:
    """A part whose script says this, and leaves a figure."""
    (place / "script.py").write_text(script)
    file = place / "figure.json"

    def call(_context: Context, _file: Path, _stack: ExitStack) -> Call:
        return Call(str(place / "script.py"), [str(file)], file)

    def figures(found: Path) -> Found:
        return Found((msgspec.json.decode(found.read_bytes(), type=Figure),))

    return Planned("a-part", "A part", call, figures, limit)


def report_of(*found: Part, quick: bool = False) -> Report:
    machine = {"cores": "2", "processor": "an ordinary one"}
    return Report(1, quick, machine, {"Python": "3.11"}, found)


def part_of(*figures: Figure, curves: tuple[Curve, ...] = ()) -> Part:
    return Part("layers", "Layers", "measured", "", 1.0, (0.1, 1.0), "2026-11-30T12:00:00Z", "abc", figures, curves)


@pytest.mark.slow
def test_a_smoke_run_measures_what_needs_nothing_and_says_what_it_did_not(tmp_path: Path) -> None:
    out = tmp_path / "report"
    command = [sys.executable, str(ROOT / "benchmarks" / "parts.py"), "--quick", "--out", str(out)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run([*command, "--dir", str(tmp_path)], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = reports.read(out)
    assert {part.name for part in found.parts} == {part.name for part in parts.PARTS}
    assert {part.name for part in found.parts if part.status == "measured"} == MEASURED_ANYWHERE
    assert [part.name for part in found.parts if part.status != "measured" and not part.reason] == []
    assert all(min(figure.ours) > 0 for part in found.parts for figure in part.figures if figure.unit == "s")
    check(found, out)
    assert "its figures mean nothing" in (out / "report.md").read_text()
    assert str(tmp_path) not in (out / "report.md").read_text() + (out / "report.json").read_text()


def check(found: Report, place: Path) -> None:
    """Every value has a row of its own to link to, and every drawing is one."""
    page = (place / "report.md").read_text()
    anchors = re.findall(r'<a id="([^"]+)">', page)
    assert len(anchors) == len(set(anchors)), "two rows have one name"
    names = [figure.name for part in found.parts for figure in part.figures]
    names += [curve.name for part in found.parts for curve in part.curves]
    assert set(names) <= set(anchors)
    drawn = re.findall(r"\]\(([^)]+\.svg)\)", page)
    assert sorted(drawn) == sorted(path.name for path in place.glob("*.svg"))
    for name in drawn:
        ET.parse(place / name)


def test_a_part_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    part = measured(planned(tmp_path, f"raise SystemExit('no room | in {tmp_path}')"), context(tmp_path))
    assert (part.status, part.figures) == ("failed", ())
    assert "exit code 1" in part.reason
    assert "no room \\| in SCRATCH" in part.reason


def test_a_part_that_takes_too_long_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    script = "import os, sys, time\nsys.stdout.write(str(os.fork()) + ' ')\nsys.stdout.flush()\ntime.sleep(600)"
    part = measured(planned(tmp_path, script, limit=2.0), context(tmp_path))
    assert part.status == "failed"
    assert "timed out" in part.reason
    children = (tmp_path / "a-part.log").read_text().split()  # none on a machine too slow to have started one by then
    wait_for(lambda: not any(alive(Path(f"/proc/{pid}/stat")) for pid in children if pid != "0"))


def alive(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def test_a_part_without_its_tools_is_not_proven(tmp_path: Path) -> None:
    def call(_context: Context, _file: Path, _stack: ExitStack) -> Call:
        raise UnmeasuredError("no such tool here")

    part = measured(Planned("a", "A", call, lambda _file: Found(), 1.0), context(tmp_path))
    assert (part.status, part.reason) == ("not proven", "no such tool here")


def test_a_part_that_is_measured_has_its_figures(tmp_path: Path) -> None:
    figure = Figure("restore-x", "restore", "s", (1.0, 2.0), "tar", (2.0, 2.0), target=0.8)
    script = f"import sys; open(sys.argv[1], 'wb').write({msgspec.json.encode(figure)!r})"
    part = measured(planned(tmp_path, script), context(tmp_path))
    assert (part.status, part.figures) == ("measured", (figure,))


def test_starts_are_compared_with_bare_ones_and_a_failed_one_is_no_figure(tmp_path: Path) -> None:
    rows = [
        {"step": "bare:one", "code": 0, "wall": 40.0, "init_engine": 20.0},
        {"step": "bare:one", "code": 0, "wall": 20.0, "init_engine": 5.0},
        {"step": "run:two", "code": 0, "wall": 44.0, "init_engine": 22.0, "result": "none", "added": {"inductor": 9}},
        {"step": "run:three", "code": 0, "wall": 10.0, "init_engine": 4.0, "result": "exact", "added": {"triton": 0}},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    found = {figure.name: figure for figure in of_starts(file).figures}
    assert found["start-restored-elsewhere-init-engine-cold"].compared == [0.2]
    assert found["start-restored-elsewhere-the-whole-command-second-in-place"].compared == [0.5]
    assert found["start-restored-elsewhere-added"].ours == (0.0,)
    assert found["start-cold-with-cachemgr-run-the-whole-command-cold"].compared == [1.1]
    on_a_gpu = {figure.name: figure for figure in of_starts_on_a_gpu(file).figures}
    assert {name.removeprefix("gpu-") for name in on_a_gpu} == set(found)
    assert on_a_gpu["gpu-start-restored-elsewhere-init-engine-cold"].met
    file.write_bytes(b"\n".join(msgspec.json.encode({**row, "code": int(row["step"] == "run:three")}) for row in rows))
    with pytest.raises(ValueError, match="run:three"):
        of_starts(file)


def test_a_program_is_compared_with_every_peer_in_seconds_kernels_and_bytes(tmp_path: Path) -> None:
    ours = programs.Start(programs.OURS, programs.AS_IT_IS, 5.0, 0.1, 0.0, 0, 0, 100, {"restored files": 9})
    cold = programs.Start(programs.COLD, programs.AS_IT_IS, 20.0, 0.0, 1.0, 8, 1, 0, {})
    mega = programs.Start(programs.MEGA, programs.AS_IT_IS, 25.0, 1.0, 0.0, 8, 1, 1000, {"inductor": 8})
    file = tmp_path / "starts.json"
    file.write_bytes(msgspec.json.encode([cold, mega, ours]))
    found = {figure.name: figure for figure in of_programs(file).figures}
    assert found["program-seconds-cold-as-it-is"].compared == [0.25]
    assert found["program-seconds-mega-cache-as-it-is"].compared == [0.2]
    assert found["program-compiled-mega-cache-as-it-is"].compared == [0.0]
    assert found["program-carried-mega-cache-as-it-is"].compared == [0.1]
    assert "8 inductor" in found["program-carried-mega-cache-as-it-is"].peer
    assert "program-carried-cold-as-it-is" not in found, "a cold start fetches nothing"


def test_ratios_are_taken_per_round() -> None:
    figure = Figure("a", "a", "s", (1.0, 4.0, 2.0), "b", (2.0, 4.0, 1.0), target=1.0)
    assert figure.compared == [0.5, 1.0, 2.0]
    assert figure.met
    assert reports.compared(figure) == "1.00 (0.50-2.00)"
    added = msgspec.structs.replace(figure, added=True, target=-1.0)
    assert added.compared == [-1.0, 0.0, 1.0]
    assert not added.met
    assert reports.compared(added) == "0.000 (-1.000-1.000) s more"


def test_a_peer_that_took_nothing_is_shown_without_a_ratio() -> None:
    figure = Figure("a", "kernels", "kernels", (0.0,), "b", (0.0,))
    assert (figure.compared, reports.compared(figure), reports.shown(figure.theirs, "kernels")) == ([], "", "0")


def test_a_curve_knows_its_power_and_that_of_its_end() -> None:
    curve = Curve("growth-x", "x", "artifacts", (10, 100, 1000), (1.0, 1.0, 10.0))
    fitted, last = curve.exponents
    assert 0.4 < fitted < 0.6
    assert last == pytest.approx(1.0)


def test_a_report_has_a_row_for_everything_and_says_which_targets_are_met(tmp_path: Path) -> None:
    good = Figure("restore-x", "restore", "s", (1.0,), "tar", (2.0,), target=1.2)
    bad = msgspec.structs.replace(good, name="capture-x", ours=(3.0,))
    alone = Figure("ls-10", "ls, 10 artifacts", "s", (0.2,))
    curve = Curve("growth-ls", "ls", "artifacts", (10, 1000), (0.2, 0.4))
    absent = Part("starts", "Starts", "not proven", "no GPU", 0.0, (0.0, 0.0), "2026-11-30T12:00:00Z", "abc")
    found = report_of(part_of(good, bad, alone, curves=(curve,)), absent)
    reports.write(found, tmp_path)
    assert reports.read(tmp_path) == found
    check(found, tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "| 0.50 | 1.2, met |" in page
    assert "| 1.50 | 1.2, not met |" in page
    assert "- Starts: no GPU" in page
    assert "Model Cache Manager" in page


def test_a_part_of_another_machine_says_where_it_was_measured(tmp_path: Path) -> None:
    here = {"cores": "16", "GPU": "NVIDIA H200", "boto3": "not installed", "Python": "3.11"}
    elsewhere = differing(here, {"cores": "2", "GPU": "none", "boto3": "1.44.8", "Python": "3.11"})
    assert elsewhere == {"cores": "16", "GPU": "NVIDIA H200"}
    part = msgspec.structs.replace(part_of(Figure("ls-10", "ls", "s", (0.2,))), elsewhere=elsewhere)
    reports.write(report_of(part), tmp_path)
    section = (tmp_path / "report.md").read_text().partition('<a id="layers">')[2]
    assert "another machine" in section
    assert "| GPU | NVIDIA H200 |" in section


def test_drawings_of_an_older_report_do_not_stay(tmp_path: Path) -> None:
    (tmp_path / "old.svg").write_text("<svg/>")
    reports.write(report_of(), tmp_path)
    assert list(tmp_path.glob("*.svg")) == []


def test_lines_of_powers_are_straight() -> None:
    drawn = ET.fromstring(log_log("t & t", "n", [("x", (10, 100, 1000), (1.0, 10.0, 100.0))]))
    (line,) = drawn.iter("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(points)]
    assert steps[0] == pytest.approx(steps[1])
    assert steps[0][1] < 0 < steps[0][0]


def test_names_are_good_for_links() -> None:
    assert named("up", "vllm026-pinned", "tar, zstd, s5cmd") == "up-vllm026-pinned-tar-zstd-s5cmd"


def test_the_readme_is_written_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{reports.BEGIN}old\n{reports.END}after\n")
    figure = Figure(reports.QUOTED[0][0], "restore", "s", (1.0, 2.0, 3.0), "tar", (1.0, 2.0, 3.0))
    reports.write_readme(report_of(part_of(figure)), page)
    text = page.read_text()
    assert text.startswith(f"before\n{reports.BEGIN}")
    assert text.endswith(f"{reports.END}after\n")
    assert "old" not in text
    assert f"report.md#{figure.name}) | 2.00 s | 2.00 s, tar | 1.00 (1.00-1.00) |" in text


def test_the_readme_says_when_the_machine_was_not_left_alone() -> None:
    quiet = part_of()
    busy = msgspec.structs.replace(quiet, load=(9.0, 9.0))
    assert "other work" not in reports.readme_table(report_of(quiet))
    assert "a load of up to 9" in reports.readme_table(report_of(quiet, busy))


def test_the_readme_says_which_lines_are_of_another_machine() -> None:
    names = [name for name, _what in reports.QUOTED[:2]]
    here, there = (part_of(Figure(name, "restore", "s", (1.0,), "tar", (1.0,))) for name in names)
    there = msgspec.structs.replace(there, elsewhere={"cores": "16"})
    said = reports.readme_table(report_of(here, there))
    assert f"#{names[0]}) |" in said
    assert f"#{names[1]})\\* |" in said
    assert "lines with \\* on other machines" in said
    assert "\\*" not in reports.readme_table(report_of(here))


def test_the_figures_of_the_readme_are_those_of_the_report() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme.count(reports.BEGIN) == readme.count(reports.END) == 1
    quoted = readme.partition(reports.BEGIN)[2].partition(reports.END)[0]
    assert quoted == reports.readme_table(reports.read(COMMITTED))


def test_the_report_is_what_its_values_say() -> None:
    found = reports.read(COMMITTED)
    assert (COMMITTED / "report.md").read_text() == reports.markdown(found)
    check(found, COMMITTED)


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_links_into_the_report_lead_to_a_row(page: str) -> None:
    links = re.findall(r"report/report\.md#([^)]+)\)", (ROOT / page).read_text())
    assert links
    anchors = set(re.findall(r'<a id="([^"]+)">', (COMMITTED / "report.md").read_text()))
    assert [link for link in links if link not in anchors] == []
