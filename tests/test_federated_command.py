"""`offbeat federated`: every run once, a table, a page, and clear words for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import colours, hover, opened
from typer.testing import CliRunner

from offbeat import report
from offbeat.cli import app
from offbeat.lab.federation import Comparison, entrants
from offbeat.lab.federation.resnet import resnet18
from offbeat.lab.results_file import ResultsFile

SMALL = ("--tasks", "2", "--clients", "2", "--samples", "120", "--rounds", "2", "--seeds", "1")
METHODS = ("--method", "finetune,fedcbdr:budget=20,balance=adjusted,uniform")


def asked(*arguments: str | Path, small: bool = True) -> Any:
    one = () if "--jobs" in arguments else ("--jobs", "1")
    every = ["federated", *(SMALL if small else ()), *one, *map(str, arguments)]
    return CliRunner().invoke(app, every)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A page with its results beside it, and what the command said."""
    page = tmp_path_factory.mktemp("federated") / "page.html"
    return page, asked(*METHODS, "--report", page)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_a_comparison_has_a_row_for_each_method_and_a_page(made: tuple[Path, Any]) -> None:
    page, done = made
    assert done.exit_code == 0, done.output
    for label in ("finetune", "fedcbdr:budget=20,balance=adju", "uniform"):
        assert label in done.output
    assert "of all classes apart in the end" in done.output
    assert "3/3 uniform, seed 0: " in done.output
    text = page.read_text()
    assert text.count('class="matrix"') == 3
    found = [line for line in lines_of(page.with_suffix(".jsonl")) if line["kind"] == "result"]
    assert [len(line["seen_accuracy"]) for line in found] == [2, 2, 2]
    nothing, exactly, at_most = (sum(line["histogram"]) for line in found)
    assert (nothing, exactly) == (0, 40)
    assert 40 < at_most <= 100  # equal parts, of which a client with few samples leaves some
    assert all(line["sent_bytes"] > line["sum_bytes"] > 0 for line in found)


def test_rounds_are_counted_on_over_the_tasks_and_each_task_is_evaluated(
    made: tuple[Path, Any],
) -> None:
    first, *_ = report.load([made[0].with_suffix(".jsonl")])
    assert [each.round for each in first.distinct_rounds] == [0, 1, 2, 3]
    assert [each.round for each in first.evaluations] == [2, 4]
    assert [each.accuracy for each in first.evaluations][-1] == first.result.final_accuracy
    assert len(first.ends) == 2 * 2  # of two clients, in two tasks


def test_the_same_command_makes_only_what_is_missing(
    made: tuple[Path, Any], tmp_path: Path
) -> None:
    kept = lines_of(made[0].with_suffix(".jsonl"))
    last = max(number for number, line in enumerate(kept) if line["kind"] == "run")
    results = tmp_path / "r.jsonl"
    torn = [json.dumps(line) + "\n" for line in kept[: last + 5]]
    results.write_text("".join(torn) + '{"kind": "comp')  # killed while the last run was written
    again = asked(*METHODS, "--results", results)
    assert again.exit_code == 0, again.output
    assert "3/3 uniform, seed 0: " in again.output
    assert "finetune, seed 0" not in again.output
    same = [{**line, "process_s": 0, "command": ""} for line in lines_of(results)]
    assert same == [{**line, "process_s": 0, "command": ""} for line in kept]
    more = asked("--method", "finetune,joint", "--results", results)
    assert more.exit_code == 0
    assert "2/2 joint, seed 0: " in more.output


def test_results_of_something_else_are_refused(made: tuple[Path, Any], tmp_path: Path) -> None:
    results = made[0].with_suffix(".jsonl")
    other = asked(*METHODS, "--results", results, "--beta", "1")
    assert other.exit_code == 2
    assert "of a federated comparison with other settings: name another file" in other.output
    file = ResultsFile(tmp_path / "c.jsonl")
    file.append({"kind": "campaign"})
    file.close()
    other = asked(*METHODS, "--results", tmp_path / "c.jsonl")
    assert "not a file of a federated comparison's results" in other.output


BAD = {
    "no method is called 'fedcdr': did you mean 'fedcbdr'": ("--method", "fedcdr"),
    "fedcbdr has no setting 'budjet': did you mean 'budget'": ("--method", "fedcbdr:budjet=3"),
    "scores must be gram or svd or svd-masked, got 'pca'": ("--method", "fedcbdr:scores=pca"),
    "uniform is named twice": ("--method", "uniform,uniform"),
    "no task is called 'fashon': did you mean 'fashion'": ("--task", "fashon"),
    "Debian's package dataset-fashion-mnist": ("--task", "fashion:/nowhere"),
    "no CIFAR-10 in this folder": ("--task", "cifar10:/nowhere"),
    "cifar10 needs the folder of its files": ("--task", "cifar10"),
    "digits take no model resnet18": ("--model", "resnet18"),
    "model must be small or resnet18, got 'vgg'": ("--model", "vgg"),
    "tasks must be between 1 and the 10 classes": ("--tasks", "11"),
    "there must be 1 client and 1 seed or more": ("--clients", "0"),
    "a buffer of 4 samples cannot hold one of each of the 5 classes": ("--budget", "4"),
    "beta of a Dirichlet split must be a number above 0": ("--beta", "0"),
    "samples must be 10 or more": ("--samples", "9"),
    "cannot give 1 to each of 200 clients": ("--clients", "200"),
    "rounds must be a whole number above 0": ("--rounds", "0"),
    "quorum must be between 1 and the 2 workers, got 3": ("--quorum", "3"),
    "there is no folder /nowhere": ("--report", "/nowhere/page.html"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_a_sentence(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFBEAT_CIFAR10", raising=False)
    done = asked(*BAD[words])
    assert done.exit_code == 2, done.output
    assert words in done.output
    assert "Traceback" not in done.output


def test_masks_without_their_package_are_refused_before_the_first_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offbeat.federated.secure.find_spec", lambda name: None)
    done = asked("--secure")
    assert done.exit_code == 2
    assert "pip install 'offbeat[federated]'" in done.output


def test_a_run_that_fails_is_told_and_tried_again(tmp_path: Path) -> None:
    cluster = tmp_path / "crash.toml"
    cluster.write_text(
        "workers = 2\n[compute]\nstep_s = 0.1\n"
        "[network]\nlatency_s = 1e-4\nbandwidth_bytes_per_s = 1e9\n"
        '[[event]]\nkind = "crash"\nworker = 1\nat_s = 0.3\n'
    )
    results = tmp_path / "r.jsonl"
    for _ in range(2):
        done = asked("--method", "finetune", "--cluster", cluster, "--results", results)
        assert done.exit_code == 1
        assert "finetune, seed 0, failed" in done.output
        assert "worker 1" in done.output
    assert len([line for line in lines_of(results) if line["kind"] == "result"]) == 2


def test_settings_after_a_comma_belong_to_the_method_before() -> None:
    found = entrants.parse(["fedcbdr:scores=svd,by_class=false,joint", "uniform"], budget=7)
    assert [each.name for each in found] == ["fedcbdr", "joint", "uniform"]
    assert found[0].settings == {"scores": "svd", "by_class": False}
    assert found[0].method(7).budget == found[2].method(7).budget == 7  # type: ignore[attr-defined]


def test_resnet18_is_the_one_of_the_paper() -> None:
    model = resnet18(3)
    assert sum(each.numel() for each in model.parameters()) == 11_173_962
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.real
@pytest.mark.timeout(300)
def test_real_processes_and_several_jobs_come_to_the_same() -> None:
    about: dict[str, Any] = {"tasks": 2, "clients": 2, "samples": 120, "rounds": 2}
    methods = ["fedcbdr,uniform"]

    def accuracies(chosen: Comparison, jobs: int = 1) -> list[list[float]]:
        runs = chosen.run(jobs=jobs)
        return [runs[place][-1]["seen_accuracy"] for place in chosen.places]

    alone = accuracies(Comparison.of(methods, **about, seeds=1))
    assert accuracies(Comparison.of(methods, **about, seeds=1), jobs=2) == alone
    real = accuracies(Comparison.of(methods, **about, seeds=1, world="real"))
    for ours, theirs in zip(real, alone, strict=True):
        assert ours == pytest.approx(theirs, abs=0.03)


# --- the page ------------------------------------------------------------------------------------


def test_the_page_draws_what_was_remembered_and_kept(made: tuple[Path, Any], browser: Any) -> None:
    shown = opened(browser, made[0])
    for chart in ("after", "buffer", "timeline", "accuracy-at_s", "shares"):
        assert colours(shown, chart) > 3, chart
    assert "samples" in hover(shown, "buffer", 0.5, 0.5)
    assert "after task 2" in hover(shown, "after", 0.95, 0.5)
    before = colours(shown, "buffer")
    shown.execute_script(
        "document.querySelectorAll('#algorithms button')[2].click()"  # uniform
    )
    assert colours(shown, "buffer") < before
    shown.execute_script("document.getElementById('theme').click()")
    assert [line for line in shown.get_log("browser") if line["level"] == "SEVERE"] == []
