"""ls, show, verify, doctor: what they print, their JSON, their exit codes; none of them changes the run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from spot_core.retention import Retention
from spot_core.run import Run

Spot = Callable[..., Result]
NEWEST, MIDDLE, OLDEST = "000002-000000000030", "000001-000000000020", "000001-000000000010"


def contents(folder: str | Path) -> dict[str, bytes | None]:
    root = Path(folder)
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def blob(run: Run, name: str, rank: int = 0) -> Path:
    return next((Path(run.uri) / "generations" / name).glob(f"*-r{rank:05d}.blob"))


def test_ls_lists_newest_first(run: Run, spot: Spot) -> None:
    done = spot("ls", run.uri)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["generation", NEWEST, MIDDLE, OLDEST]
    assert lines[1].split()[1:3] == ["30", "2"]
    assert "interval" in lines[1]


def test_ls_json_has_its_keys(run: Run, spot: Spot) -> None:
    value = json.loads(spot("ls", run.uri, "--json").stdout)
    record = run.record()
    assert record is not None
    assert sorted(value) == ["generations", "lenders", "problems", "run", "run_id"]
    assert value["run_id"] == record.run_id
    newest = value["generations"][0]
    names = ["bytes", "created", "finished", "life", "name", "own_bytes", "reason", "refers_to", "step", "world_size"]
    assert sorted(newest) == names
    assert (newest["name"], newest["life"], newest["step"], newest["world_size"]) == (NEWEST, 2, 30, 2)


def test_what_is_referred_to_is_told(tmp_path: Path, spot: Spot) -> None:
    run = Run.open(tmp_path / "run")
    writer = run.claim()
    for step in (1, 2, 3):
        opened = writer.begin(step)
        part = opened.write(0, {"w": b"w" * 100}, unchanging={"base": b"b" * 2000})
        opened.seal([part], world_size=1).commit({})
    writer.prune(Retention(2))
    first, second, third = (f"000001-00000000000{step}" for step in (1, 2, 3))
    listed = spot("ls", run.uri)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["generation", third, second, first]
    assert f"2.0 kB of {first}" in listed.stdout
    assert f"{first} was pruned; 1 objects stay, which later generations refer to." in listed.stdout
    value = json.loads(spot("ls", run.uri, "--json").stdout)
    newest = value["generations"][0]
    assert newest["refers_to"] == [first]
    assert newest["bytes"] == newest["own_bytes"] + 2000
    assert [lender["name"] for lender in value["lenders"]] == [first]
    shown = spot("show", run.uri)
    assert f"2.0 kB of {first}, which stay for it when those are pruned" in " ".join(shown.stdout.split())
    for depth in ("sizes", "digests"):
        assert spot("verify", run.uri, "--depth", depth).exit_code == 0
    ((key,),) = [lender["objects"] for lender in value["lenders"]]
    Path(run.uri, key).write_bytes(b"x" * 2000)
    assert spot("verify", run.uri).exit_code == 0
    assert spot("verify", run.uri, "--depth", "digests").exit_code == 4
    Path(run.uri, key).unlink()
    assert spot("verify", run.uri).exit_code == 4


@pytest.mark.parametrize("command", ["ls", "show", "verify", "doctor"])
def test_looking_has_no_effect(run: Run, spot: Spot, command: str) -> None:
    before = contents(run.uri)
    assert spot(command, run.uri).exit_code == 0
    assert contents(run.uri) == before


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_nothing_there_is_code_3_and_makes_nothing(tmp_path: Path, spot: Spot, command: str) -> None:
    done = spot(command, tmp_path / "absent")
    assert done.exit_code == 3
    assert str(tmp_path / "absent") in done.stdout + done.stderr
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("text", "name"), [(None, NEWEST), (NEWEST, NEWEST), ("1-20", MIDDLE), ("10", OLDEST), ("2-30", NEWEST)]
)
def test_show_finds_a_generation_by_each_of_its_names(run: Run, spot: Spot, text: str | None, name: str) -> None:
    args = ["show", run.uri, "--json"] + ([] if text is None else [text])
    value = json.loads(spot(*args).stdout)
    assert sorted(value) == ["generation", "manifest", "run"]
    assert value["generation"]["name"] == name
    assert len(value["manifest"]["parts"]) == value["generation"]["world_size"]


def test_show_prints_objects_and_meta(run: Run, spot: Spot) -> None:
    done = spot("show", run.uri)
    assert done.exit_code == 0
    assert "interval" in done.stdout
    assert "xxh3_128-tree:" in done.stdout
    assert f"generations/{NEWEST}/" in done.stdout


@pytest.mark.parametrize("text", ["99", "3-30", "nonsense"])
def test_an_unknown_generation_is_code_3_with_what_to_do(run: Run, spot: Spot, text: str) -> None:
    done = spot("show", run.uri, text)
    assert done.exit_code == 3
    assert "error: " in done.stderr
    assert "do: List them with `spot ls`." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("depth", ["marker", "sizes", "digests"])
def test_verify_passes_a_whole_run_at_each_depth(run: Run, spot: Spot, depth: str) -> None:
    value = spot("verify", run.uri, "--depth", depth, "--json")
    assert value.exit_code == 0
    told = json.loads(value.stdout)
    assert sorted(told) == ["depth", "generations", "problems", "run"]
    assert [(item["name"], item["ok"]) for item in told["generations"]] == [
        (NEWEST, True), (MIDDLE, True), (OLDEST, True)
    ]  # fmt: skip
    assert sorted(told["generations"][0]) == ["message", "name", "ok", "reason"]


def test_a_flipped_bit_shows_at_digests_only(run: Run, spot: Spot) -> None:
    path = blob(run, NEWEST, rank=1)
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    assert spot("verify", run.uri, "--depth", "sizes").exit_code == 0
    done = spot("verify", run.uri, "--depth", "digests")
    assert done.exit_code == 4
    told = {line.split()[0]: line.split()[2] for line in done.stdout.splitlines()[1:]}
    assert told == {NEWEST: "corrupt", MIDDLE: "ok", OLDEST: "ok"}
    assert path.name in done.stdout


def test_a_deleted_shard_is_torn_at_sizes(run: Run, spot: Spot) -> None:
    blob(run, MIDDLE).unlink()
    assert spot("verify", run.uri, "--depth", "marker").exit_code == 0
    value = spot("verify", run.uri, "--json")
    assert value.exit_code == 4
    assert {item["name"]: item["reason"] for item in json.loads(value.stdout)["generations"]} == {
        NEWEST: None, MIDDLE: "torn", OLDEST: None
    }  # fmt: skip
    assert spot("verify", run.uri, NEWEST).exit_code == 0


def test_a_ruined_marker_is_damage_wherever_it_is_looked_at(run: Run, spot: Spot) -> None:
    (Path(run.uri) / "generations" / NEWEST / "COMMIT.json").write_text("{")
    listed = spot("ls", run.uri)
    assert listed.exit_code == 0
    assert f"format: Generation {NEWEST}" in listed.stdout
    assert spot("show", run.uri, NEWEST).exit_code == 4
    assert spot("verify", run.uri).exit_code == 4
    for name in (MIDDLE, OLDEST):
        (Path(run.uri) / "generations" / name / "COMMIT.json").write_text("{")
    assert spot("ls", run.uri).exit_code == 4


def test_an_error_while_looking_is_code_5_never_nothing(run: Run, spot: Spot) -> None:
    """A file where a folder belongs is an I/O error for everybody, root included."""
    generations = Path(run.uri) / "generations"
    generations.rename(Path(run.uri) / "aside")
    generations.symlink_to(generations)
    done = spot("ls", run.uri)
    assert done.exit_code == 5
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_of_something_else_is_no_run(tmp_path: Path, spot: Spot) -> None:
    (tmp_path / "spot.json").write_text("[1, 2]")
    done = spot("ls", tmp_path)
    assert done.exit_code == 3
    assert "is not a run record" in done.stderr


@pytest.mark.parametrize("args", [["ls"], ["verify", "x", "--depth", "deep"], ["nonsense"], ["ls", "s3:bucket"]])
def test_a_wrong_call_is_code_2(spot: Spot, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOT_RUN", raising=False)
    assert spot(*args).exit_code == 2


def test_the_run_may_come_from_the_environment(run: Run, spot: Spot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOT_RUN", run.uri)
    assert json.loads(spot("ls", "--json").stdout)["run"] == run.uri


def test_doctor_of_a_good_run(run: Run, spot: Spot) -> None:
    value = json.loads(spot("doctor", run.uri, "--json").stdout)
    assert value["ok"] is True
    told = {item["check"]: item["detail"] for item in value["findings"]}
    looked = ["run record", "generations", "newest generation", "lives"]
    tried = ["look", "write", "write once", "read", "list", "clock", "speed", "delete", "space"]
    assert list(told) == [*looked, *tried, "versions"]
    assert told["generations"] == "3 committed"
    assert told["write once"] == "a name that is taken is refused"
    assert told["delete"] == "the probes are gone again"
    assert told["lives"].startswith("2;")


def test_doctor_names_the_damage_of_the_newest(run: Run, spot: Spot) -> None:
    blob(run, NEWEST).unlink()
    done = spot("doctor", run.uri)
    assert done.exit_code == 4
    fault = next(line for line in done.stdout.splitlines() if "FAULT" in line)
    assert fault.startswith("newest generation")
    assert "is missing" in fault


def test_doctor_without_write_leaves_an_absent_place_absent(tmp_path: Path, spot: Spot) -> None:
    assert spot("doctor", tmp_path / "absent", "--no-write").exit_code == 0
    assert not (tmp_path / "absent").exists()


def test_in_a_real_process_without_torch(run: Run) -> None:
    program = (
        "import sys; from spot_core.cli import app\n"
        f"try: app(['ls', {run.uri!r}])\n"
        "finally: print(sorted({'torch', 'numpy', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert NEWEST in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_script_and_the_module_are_the_same_command(run: Run) -> None:
    script = [str(Path(sys.executable).with_name("spot"))]
    outputs = []
    for command in (script, [sys.executable, "-m", "spot_core.cli"]):
        done = subprocess.run([*command, "show", run.uri, "99"], capture_output=True, text=True, check=False)
        assert done.returncode == 3
        outputs.append(done.stderr)
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("error: There is no generation 99")
