"""`offbeat campaign`: every run once, whatever happens in between."""

from __future__ import annotations

import json
import resource
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offbeat import report
from offbeat.cli import app
from offbeat.errors import ReportError
from offbeat.lab.campaign import PROCESSES, Campaign
from offbeat.lab.campaign_file import Settings
from offbeat.lab.progress import Progress
from offbeat.lab.results import Result
from offbeat.lab.results_file import ResultsFile

SMALL: dict[str, Any] = {
    "algorithms": ["sync", "eager"],
    "clusters": ["half-speed-4", "mixed-4"],
    "tasks": ["quadratic"],
    "seeds": 2,
    "rates": "1,2",
    "trials": 3,
    "until": "10rounds",
}
RUNS = 2 * 2 * 2


class Interrupting(Progress):
    """Presses Ctrl-C after so many runs."""

    def __init__(self, after: int) -> None:
        self.after = after

    def end(self, label: str, figures: dict[str, Any]) -> None:
        self.after -= 1
        if not self.after:
            raise KeyboardInterrupt


def done(
    path: Path, show: Progress | None = None, engine: str = PROCESSES, **changed: Any
) -> list[Result]:
    """Run a campaign as far as it goes; its results so far, in order."""
    campaign = Campaign(Settings(**{**SMALL, **changed}))
    file = ResultsFile(path)
    try:
        campaign.read(file)
        campaign.run(file, show or Progress(), jobs=2, engine=engine)
    except KeyboardInterrupt:
        pass
    finally:
        file.close()
    return [result for race in range(len(campaign.races)) for result in campaign.lines(race)[1]]


def kinds(path: Path) -> Counter[str]:
    return Counter(json.loads(line)["kind"] for line in path.read_text().splitlines())


@pytest.mark.slow
def test_a_campaign_goes_on_where_it_was_interrupted_and_does_nothing_twice(tmp_path: Path) -> None:
    whole = done(tmp_path / "whole.jsonl")
    assert len(whole) == RUNS
    path = tmp_path / "parts.jsonl"
    assert len(done(path, Interrupting(after=3))) == 3
    with path.open("a") as file:  # and a crash, while the next was being written down
        file.write('{"kind": "run", "label": "sync"}\n{"kind": "result", "la')
    assert done(path) == whole
    expected = {"campaign": 1, "tuned": 4, "run": RUNS, "result": RUNS}
    assert kinds(path) == kinds(tmp_path / "whole.jsonl") == expected
    before = path.read_bytes()
    assert done(path) == whole
    assert path.read_bytes() == before
    names = {row.name for row in report.rows(report.load([path]))}
    assert names == {f"{a}, {c}" for a in SMALL["algorithms"] for c in SMALL["clusters"]}


def test_results_of_something_else_are_refused_and_left_alone(tmp_path: Path) -> None:
    def refused(words: str, **changed: Any) -> None:
        before = path.read_bytes()
        file = ResultsFile(path)
        with pytest.raises(ReportError, match=words):
            Campaign(Settings(**{**SMALL, **changed})).read(file)
        file.close()
        assert path.read_bytes() == before

    path = tmp_path / "r.jsonl"
    file = ResultsFile(path)
    Campaign(Settings(**SMALL)).read(file)
    file.close()
    refused("of a campaign with other settings: name another file", seeds=3)
    head = json.loads(path.read_text())
    path.write_text(json.dumps({**head, "offbeat": "0.0.1"}) + "\n")
    refused(r"another version \(0\.0\.1, this is")
    path.write_text('{"kind": "run"}\n{"kind": "result"}\n')
    refused("not a file of a campaign's results")
    path.write_text(json.dumps(head) + "\nnonsense\n" + json.dumps(head) + "\n")
    refused("line 2: not a line of results")


def test_two_campaigns_do_not_write_into_one_file(tmp_path: Path) -> None:
    first = ResultsFile(tmp_path / "r.jsonl")
    with pytest.raises(ReportError, match="another command is writing there"):
        ResultsFile(tmp_path / "r.jsonl")
    first.close()
    ResultsFile(tmp_path / "r.jsonl").close()


def test_a_full_disk_is_said() -> None:
    file = ResultsFile(Path("/dev/full"))
    with pytest.raises(ReportError, match="No space left on device; what was there is kept"):
        file.append({"kind": "campaign"})
    file.close()


def test_a_disk_that_is_full_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    file = ResultsFile(path)
    file.append({"kind": "campaign"})
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))  # half of a line fits
    try:
        with pytest.raises(ReportError, match="what was there is kept, and the same command"):
            file.append({"kind": "tuned", "label": "sync"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    file.append({"kind": "tuned"})
    file.close()
    assert kinds(path) == {"campaign": 1, "tuned": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("algorithms = [", "not TOML"),
        (
            'algorithms = ["sync"]\ntasks = ["quadratic"]',
            "needs clusters and tasks, or [[race]] tables",
        ),
        ("{small}\nsedes = 3", 'key "sedes": not a known key (known: algorithms, '),
        (
            "{small}\n[[race]]\n{rest}\ntrials = 3",
            'key "race.0.trials": not a known key (known: clusters, ',
        ),
        ('{small}\nseeds = "3"', 'key "seeds": Input should be a valid integer'),
        ("{small}\nseeds = 0", "seeds must be between"),
        ('{small}\nrates = "1,2"\ntrials = 2', "the best is always at the edge"),
        ('algorithms = ["snyc"]\n{rest}', "did you mean 'sync'"),
        ('algorithms = ["eager:quorum=5"]\n{rest}', "between 1 and the 4 workers, got 5"),
        ('algorithms = ["eager:quorum=5"]\n{rest}', "quadratic on half-speed-4: eager:quorum=5: "),
        ('{small}\ntarget = "fast"', "target must be such as"),
        (
            'algorithms = ["sync"]\nclusters = ["mixed-4", "mixed-4"]\ntasks = ["quadratic"]',
            "quadratic on mixed-4 is named twice",
        ),
    ],
)
def test_what_is_wrong_with_a_campaigns_file_is_said(tmp_path: Path, text: str, words: str) -> None:
    rest = 'clusters = ["half-speed-4"]\ntasks = ["quadratic"]'
    path = tmp_path / "c.toml"
    path.write_text(
        text.replace("{small}", f'algorithms = ["sync"]\n{rest}').replace("{rest}", rest)
    )
    done = CliRunner().invoke(app, ["campaign", str(path)])
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_the_command_shows_a_table_and_a_sentence_for_each_race(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        'algorithms = ["sync", "eager"]\nclusters = ["half-speed-4"]\ntasks = ["timing"]\n'
        'seeds = 1\nuntil = "10rounds"\n'
    )
    for _ in range(2):  # the second time there is nothing left to do
        done = CliRunner().invoke(app, ["campaign", str(path), "--jobs", "1"])
        assert done.exit_code == 0, done.output
        assert "timing on half-speed-4" in done.stdout
        assert "The most samples a second has eager" in done.stdout
    assert kinds(tmp_path / "c.jsonl") == {"campaign": 1, "tuned": 2, "run": 2, "result": 2}


def test_races_can_be_named_one_by_one_and_the_first_are_whole_first(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("workers = 2\n[compute]\nstep_s = 0.1\n")
    text = """
        algorithms = ["sync", "eager"]
        seeds = 1
        rates = "1"
        until = "4rounds"
        [[race]]
        clusters = ["own.toml"]
        tasks = ["quadratic"]
        [[race]]
        clusters = ["half-speed-4"]
        tasks = ["quadratic", "timing"]
        algorithms = ["local"]
    """
    (tmp_path / "c.toml").write_text(text)
    campaign = Campaign(Settings.load(tmp_path / "c.toml"))
    file = ResultsFile(tmp_path / "c.jsonl")
    campaign.read(file)
    campaign.run(file, Progress(), jobs=1)
    file.close()
    lines = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    found = [(each["cluster"], each["task"], each["label"]) for each in lines if "seed" in each]
    half, in_order = "half-speed-4", list(dict.fromkeys(found))
    assert set(in_order[:2]) == {("own", "quadratic", "sync"), ("own", "quadratic", "eager")}
    assert in_order[2:] == [(half, "quadratic", "local"), (half, "timing", "local")]
    races = [each["race"] for each in lines if each["kind"] == "result"]
    assert races == sorted(races)


def test_a_cluster_file_that_has_changed_is_another_campaign(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("workers = 2\n[compute]\nstep_s = 0.1\n")
    chosen = {**SMALL, "clusters": [str(own)]}
    file = ResultsFile(tmp_path / "r.jsonl")
    Campaign(Settings(**chosen)).read(file)
    own.write_text("workers = 2\n[compute]\nstep_s = 0.2\n")
    with pytest.raises(ReportError, match="of a campaign with other settings"):
        Campaign(Settings(**chosen)).read(file)
    file.close()


@pytest.mark.parametrize(
    ("engine", "words"),
    [("dask", "engine must be processes, ray or ray:ADDRESS, got 'dask'"), ("ray", "pip install")],
)
def test_an_engine_that_is_not_there_is_said(tmp_path: Path, engine: str, words: str) -> None:
    if engine == "ray" and find_spec("ray") is not None:
        pytest.skip("Ray is installed")
    path = tmp_path / "c.toml"
    path.write_text('algorithms = ["sync"]\nclusters = ["half-speed-4"]\ntasks = ["quadratic"]')
    done = CliRunner().invoke(app, ["campaign", str(path), "--engine", engine])
    assert done.exit_code == 2
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.frameworks
@pytest.mark.filterwarnings("default")  # of Ray itself
def test_a_ray_cluster_of_two_processes_comes_to_the_same(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install 'offbeat[ray]'")
    here = done(tmp_path / "here.jsonl")
    assert done(tmp_path / "ray.jsonl", engine="ray") == here
    assert kinds(tmp_path / "ray.jsonl") == kinds(tmp_path / "here.jsonl")
