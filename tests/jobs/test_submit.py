"""Submitting: what is sent, what is refused before anything is, and what becomes of the job."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

from jobs import cli, following, package, submit
from jobs.ending import Failure
from jobs.following import Log, ending_of, follow
from jobs.job_server import ClusterNode, JobServer, address_of, token_trouble
from jobs.package import collect, pack, refuse_oversize
from jobs.submit import DriverWish, Request, checked, driver_place, entrypoint, forwarded, own_data
from pipeline.config import load_config
from pipeline.errors import ConfigError, WorkerLost
from tests.jobs.head import Head, ray_head
from tests.models import tiny_folder

ROOT = Path(__file__).resolve().parents[2]


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


# --- what is sent


def test_code_is_sent_and_hidden_files_environments_caches_and_data_are_not(tmp_path: Path) -> None:
    code = ["actors/log.py", "configs/job.yaml", "jobs/out/x.py", "logs/keep.txt", "notes.bin", "pipeline/a/b.py"]
    write(
        tmp_path, *code, ".git/config", ".venv/lib/x.py", ".env", "jobs/.cache/x", "old/pyvenv.cfg", "old/lib/x.py",
        "mamba/conda-meta/x.json", "mamba/x.py", "venv/x.py", "web/node_modules/x.js", "jobs/__pycache__/x.pyc",
        "x.egg-info/PKG-INFO", "out/part.json", "data/a.parquet", "models/m.gguf", "models/m.safetensors",
        ".gitignore", ".rayignore",
    )  # fmt: skip
    (tmp_path / ".gitignore").write_text("*\n")
    (tmp_path / ".rayignore").write_text("*\n")
    assert list(collect(tmp_path)) == code


def test_links_to_files_are_followed_and_links_to_folders_are_not(tmp_path: Path) -> None:
    root = tmp_path / "project"
    write(tmp_path, "shared/huge.txt", "elsewhere.py")
    write(root, "jobs/run.py")
    (root / "linked.py").symlink_to(tmp_path / "elsewhere.py")
    (root / "shared").symlink_to(tmp_path / "shared")
    (root / "loop").symlink_to(root)
    (root / "broken").symlink_to(tmp_path / "nothing")
    os.mkfifo(root / "pipe")
    assert list(collect(root)) == ["jobs/run.py", "linked.py"]


def test_the_package_changes_with_every_edit_and_with_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "project"
    write(root, "jobs/run.py", "b.py")
    (root / "b.py").chmod(0o755)

    def packed() -> bytes:
        pack(collect(root), {"submitted-job/job.yaml": b"name: x"}, tmp_path / "p.zip")
        return (tmp_path / "p.zip").read_bytes()

    first = packed()
    os.utime(root / "b.py", (1e9, 1e9))
    write(root, ".git/HEAD", "out/x")
    assert packed() == first
    (root / "jobs/run.py").write_text("edited")
    assert packed() != first
    with zipfile.ZipFile(tmp_path / "p.zip") as found:
        assert found.namelist() == ["b.py", "jobs/run.py", "submitted-job/job.yaml"]
        assert found.read("jobs/run.py") == b"edited"
        assert found.getinfo("b.py").external_attr >> 16 & 0o777 == 0o755


def test_a_folder_over_the_limit_is_refused_with_its_largest_entries(tmp_path: Path) -> None:
    write(tmp_path, "jobs/run.py")
    for name, size in (("video.mov", 40), ("lib/one.so", 25), ("lib/two.so", 25)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(size * 2**20)
    files = collect(tmp_path)
    refuse_oversize(tmp_path, files, limit=91 * 2**20)
    named = r"90\.0 MiB, .* 89\.0 MiB; .*: lib/ \(50\.0 MiB\), video\.mov \(40\.0 MiB\), jobs/"
    with pytest.raises(ConfigError, match=named):
        refuse_oversize(tmp_path, files, limit=89 * 2**20)
    assert package.LIMIT_BYTES == 512 * 2**20


def test_nothing_is_asked_of_the_cluster_before_the_folder_is_found_small_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "pipeline/x.py")
    with (tmp_path / "big").open("wb") as file:
        file.truncate(600 * 2**20)
    monkeypatch.setattr(submit, "ROOT", tmp_path)
    assert cli.main(["submit", job_file(tmp_path), "--address", "http://127.0.0.1:1"]) == 2
    assert "big (600.0 MiB)" in capsys.readouterr().err


def job_file(folder: Path, name: str = "wire.yaml", **changes: str) -> str:
    keys = {"input": "/data/in", "output": "/data/out", "model": "org/model", "draft": "", "more": ""} | changes
    (folder / name).write_text(
        f"name: wire\ninput: {{path: {keys['input']}, text: body}}\noutput: {{path: {keys['output']}}}\n"
        f"target: {{model: {keys['model']}}}\n{keys['draft']}\n{keys['more']}\n"
        "tasks: [{name: answer, prompt: 'Retell: {body}', max_new_tokens: 8}]\n"
    )
    return str(folder / name)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("output.path", {"output": "out/wire"}),
        ("output.path", {"output": "file://out/wire"}),
        ("output.path", {"output": "~/out"}),
        ("input.path", {"input": "stories/*.parquet"}),
        ("input.path", {"input": "[/data/in, stories]"}),
        ("target.model", {"model": "./model"}),
        ("target.model", {"model": "weights.gguf"}),
        ("target.model", {"model": "configs"}),  # a folder that is here
        ("draft.model", {"draft": "draft: {kind: model, model: ../small}"}),
    ],
)
def test_what_means_something_else_on_the_cluster_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, changes: dict[str, str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=rf"wire\.yaml: {key}: .* mean the same on all"):
        checked(Request(Path(job_file(tmp_path, **changes))))
    fine = job_file(tmp_path, input="[/data/in, file:///data/more]", model="/models/m.gguf")
    assert checked(Request(Path(fine))).name == "wire"
    with pytest.raises(ConfigError, match=r"output\.path: out, input\.path: in\.jsonl: relative"):
        checked(Request(Path(fine), overrides=("output.path=out", "input.path=in.jsonl")))
    relative = job_file(tmp_path, output="out")
    assert checked(Request(Path(relative), overrides=("output.path=/data/out",))).output.path == "/data/out"


def test_what_the_job_reads_and_writes_in_the_folder_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "jobs/run.py", "stories/a.jsonl", "stories/readme.md", "results/x.json", "net/config.json", "b.txt")
    monkeypatch.setattr(submit, "ROOT", tmp_path)
    elsewhere = tmp_path.with_name("elsewhere")
    elsewhere.mkdir(exist_ok=True)
    file = job_file(
        elsewhere, input=f"[{tmp_path}/stories, {tmp_path}/*.txt]", output=f"{tmp_path}/results",
        model=f"{tmp_path}/net",
    )  # fmt: skip
    sent = collect(tmp_path, own_data(load_config(file)))
    assert list(sent) == ["jobs/run.py"]


def test_options_reach_the_driver_unharmed() -> None:
    request = Request(
        Path("/elsewhere/wire night.yaml"), ("tasks.0.prompt=It's {body}; $HOME `x`", "seed=3"), "nightly",
        ("--limit", "5", "--until", "2024-05-18T06:00+02:00"), python="/opt/py thon",
    )  # fmt: skip
    command = entrypoint(request)
    assert command.startswith("exec ")
    assert shlex.split(command)[1:] == [
        "/opt/py thon", "-m", "jobs", "nightly", "submitted-job/wire night.yaml",
        "--set", "tasks.0.prompt=It's {body}; $HOME `x`", "--set", "seed=3",
        "--limit", "5", "--until", "2024-05-18T06:00+02:00",
    ]  # fmt: skip


def test_the_command_line_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noted(*arguments: Any) -> int:
        seen.append(arguments)
        return 3

    for name in ("submit", "attach", "cancel"):
        monkeypatch.setattr(submit, name, noted)
    file = job_file(tmp_path)
    options = ["--set", "seed=1", "--limit", "2", "--fresh", "--retry-failed", "--until", "2024-05-18T06:00+00:00"]
    more = ["--env", "A=b=c", "--driver-cpus", "2", "--driver-label", "zone=x", "--job-id", "n1"]
    more += ["--nightly", "--follow"]
    assert cli.main(["submit", file, *options, *more, "--address", "http://h:1"]) == 3
    request, address, followed = seen[0]
    assert (address, followed) == ("http://h:1", True)
    assert request.options[:4] == ("--fresh", "--retry-failed", "--limit", "2")
    assert request.options[4] == "--until"
    assert pd.Timestamp(request.options[5]) == pd.Timestamp("2024-05-18T06:00+00:00")
    assert (request.command, request.job_id, request.overrides) == ("nightly", "n1", ("seed=1",))
    assert (request.environment, request.driver) == ({"A": "b=c"}, DriverWish(2.0, {"zone": "x"}))
    cli.main(["submit", file])
    assert seen[1][0] == Request(Path(file))
    cli.main(["submit", "--cancel", "n1", "--address", "u"])
    cli.main(["submit", "--attach", "n2"])
    assert seen[2:] == [("u", "n1"), (None, "n2")]


@pytest.mark.parametrize(
    "arguments", [[], ["x.yaml", "--cancel", "n1"], ["--cancel", "a", "--attach", "b"], ["x.yaml", "--env", "A"]]
)
def test_a_command_line_that_asks_for_two_things_or_none_is_refused(arguments: list[str]) -> None:
    assert cli.main(["submit", *arguments]) == 2


def test_secrets_and_folders_of_this_machine_stay_here() -> None:
    given = {
        "NIGHTDESK_DEBUG": "1", "NIGHTDESK_CACHE": "/home/me/.cache", "HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_x",
        "HF_HOME": "~/hf", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "y", "RAY_AUTH_TOKEN": "z", "PATH": "/bin",
        "NIGHTDESK_WEBHOOK_SECRET": "w",
    }  # fmt: skip
    sent, withheld = forwarded(given)
    assert sent == {"NIGHTDESK_DEBUG": "1", "HF_HUB_OFFLINE": "1"}
    assert withheld == ["HF_HOME", "HF_TOKEN", "NIGHTDESK_CACHE", "NIGHTDESK_WEBHOOK_SECRET"]


# --- where the driver goes


def node(name: str, gpus: float = 0.0, cpus: float = 8.0, head: bool = False) -> ClusterNode:
    return ClusterNode(name, head, gpus, cpus)


def test_the_driver_stays_away_from_machines_with_gpus_where_there_are_others() -> None:
    def place(*nodes: ClusterNode, **wish: Any) -> tuple[float, dict[str, str]]:
        found = driver_place(nodes, DriverWish(**wish))
        return found.cpus, dict(found.labels)

    plain_head, gpu_head = node("aa", head=True), node("aa", gpus=1, head=True)
    assert place(plain_head, node("bb", gpus=8)) == (0, {}), "Ray puts it on the head node"
    assert place(gpu_head, node("bb", gpus=8), node("dd"), node("cc")) == (1, {"ray.io/node-id": "in(cc,dd)"})
    assert place(gpu_head, node("bb", gpus=8)) == (0, {}), "there is nowhere else"
    assert place(plain_head, node("bb", gpus=8), node("cc", cpus=2), cpus=4) == (4, {"ray.io/node-id": "in(aa)"})
    assert place(gpu_head, node("bb"), labels={"pool": "cpu"}) == (0, {"pool": "cpu"})
    with pytest.raises(ConfigError, match="--driver-cpus: no machine without GPUs has 16 cores"):
        place(plain_head, node("bb", gpus=8, cpus=64), cpus=16)


def test_the_label_selector_is_one_that_ray_accepts() -> None:
    from ray._private.label_utils import validate_label_selector

    nodes = [node("a" * 56, gpus=1, head=True), node("b" * 56), node("c" * 56)]
    assert validate_label_selector(dict(driver_place(nodes, DriverWish()).labels)) is None


# --- the address


def test_what_the_command_line_says_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="--address: give the URL"):
        address_of(None)
    monkeypatch.setenv("RAY_ADDRESS", "http://b:1")
    assert address_of(None) == "http://b:1"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://a:1/")
    assert address_of(None) == "http://a:1"
    assert address_of("http://c:1") == "http://c:1"


def test_an_address_where_nothing_listens_is_named_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=r"nothing answers at http://127\.0\.0\.1:1 .*; nothing was sent"):
        JobServer("http://127.0.0.1:1")
    assert time.monotonic() - started < 5
    with pytest.raises(ConfigError, match="is no address"):
        JobServer("http://:x")


# --- following


def details(status: JobStatus, code: int | None = None, message: str | None = None) -> JobDetails:
    return JobDetails(
        type=JobType.SUBMISSION, submission_id="n1", status=status, driver_exit_code=code, message=message,
        entrypoint="",
    )  # fmt: skip


class Scripted:
    """A job whose log is cut off again and again: each of `connections` is how many chunks come before it is lost."""

    def __init__(self, chunks: list[str], connections: list[int], end: JobDetails) -> None:
        self.chunks = chunks
        self.connections = connections
        self.end = end
        self.silent = 0  # times that it does not even say how it stands

    def job(self) -> JobDetails:
        if self.silent:
            self.silent -= 1
            raise WorkerLost("no answer")
        return self.end if not self.connections else details(JobStatus.RUNNING)

    async def tail(self, take: Callable[[str], None]) -> None:
        await asyncio.sleep(0)
        if not self.connections:
            for chunk in self.chunks:
                take(chunk)
            return
        for chunk in self.chunks[: self.connections.pop(0)]:
            take(chunk)
        raise ConnectionResetError("lost")


def test_every_line_is_printed_once_over_lost_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [f"line {i}\n" for i in range(5)]
    job = Scripted(chunks, [2, 0, 4, 1], details(JobStatus.SUCCEEDED, 0))
    job.silent = 2
    out, notices = io.StringIO(), []
    assert follow(job, Log(out), notices.append, retry=0) == Failure(0, "")
    assert out.getvalue() == "".join(chunks)
    assert notices == ["the connection is lost; trying again"]
    monkeypatch.setattr(following, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(WorkerLost, match="may go on"):
        follow(Scripted(chunks, [1], job.end), Log(io.StringIO()), notices.append, retry=0)


def test_a_text_that_comes_in_other_pieces_is_printed_once() -> None:
    log = Log(out := io.StringIO())
    for pieces in (["abc", "de"], ["a", "bcdefg"], ["abcdefgh"]):
        log.begin()
        for piece in pieces:
            log.take(piece)
    assert out.getvalue() == "abcdefgh"


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (details(JobStatus.SUCCEEDED, 0), 0, "^$"),
        *((details(JobStatus.FAILED, code), code, "^$") for code in (1, 2, 3, 4, 5)),
        (details(JobStatus.FAILED, 9), 1, "^$"),
        (details(JobStatus.FAILED, 127), 2, "--python"),
        (details(JobStatus.FAILED, -9), 4, "signal 9"),
        (details(JobStatus.FAILED, 137), 4, "signal 9"),
        (details(JobStatus.FAILED, None, "runtime_env setup\nfailed"), 4, "end: runtime_env setup failed; the same"),
        (details(JobStatus.STOPPED), 4, "the same submit continues"),
    ],
)
def test_the_jobs_end_is_an_exit_code_of_ours(end: JobDetails, code: int, said: str) -> None:
    found = ending_of(end)
    assert found.code == code
    assert re.search(said, found.message)


# --- on a real head with token authentication


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "m", seed=0, num_hidden_layers=1)


def tiny(folder: Path, model: Path, rows: int = 12, tokens: int = 8, prompt: str = "Retell: {body}") -> str:
    lines = (json.dumps({"id": str(i), "body": f"{i} ships left"}) + "\n" for i in range(rows))
    (folder / "in.jsonl").write_text("".join(lines))
    (folder / "job.yaml").write_text(
        f"name: tiny\ninput: {{path: {folder}/in.jsonl, id: id, text: body}}\n"
        f"output: {{path: {folder}/out, rows_per_shard: 4}}\ntarget: {{model: {model}, dtype: float32}}\n"
        f"decoding: {{batch: 4}}\ntasks: [{{name: answer, prompt: '{prompt}', max_new_tokens: {tokens}}}]\n"
    )
    return str(folder / "job.yaml")


def command(head: Head, *arguments: str, root: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "jobs", "submit", *arguments, "--address", head.address],
        cwd=root, env={**inherited, **head.environment, **environment}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def done(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "asks for a token (no): set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"),
        ({"RAY_AUTH_TOKEN": "x"}, "asks for a token (no): set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}, "refuses the token in RAY_AUTH_TOKEN (no)"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/no/such"}, "names a file that is not there: /no/such"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/dev/null"}, "refuses the token in /dev/null"),
    ],
)
def test_what_is_wrong_with_a_token_is_said(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert said in token_trouble("no")


@pytest.mark.slow
def test_what_runs_is_what_is_in_the_folder_even_below_a_gitignore_that_names_it(
    head: Head, model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "above" / "project"
    root.mkdir(parents=True)
    for name in ("jobs", "actors", "pipeline"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root.parent / ".gitignore").write_text("log*\n*.yaml\npipeline/\n")
    (root / ".gitignore").write_text("log*\n")
    subprocess.run(["git", "init", "-q", str(root.parent)], check=True)
    (root / "logbook.py").write_text("print('logbook: first', flush=True)\n")
    with (root / "jobs/run.py").open("a") as module:
        module.write("\nimport logbook\n")
    file = tiny(tmp_path, model)
    code, out, err = done(command(head, file, "--follow", root=root))
    assert code == 0, out + err
    assert "logbook: first" in out
    assert "12/12 rows" in out, "progress"
    before = pd.read_parquet(tmp_path / "out").set_index("id")["answer"]

    (root / "logbook.py").write_text("print('logbook: edited', flush=True)\n")
    file = tiny(tmp_path, model, prompt="Shout, do not tell, this: {body}")
    code, out, err = done(command(head, file, "--follow", "--nightly", "--reanswer", root=root))
    assert code == 0, out + err
    assert "logbook: edited" in out
    assert "logbook: first" not in out
    assert out.splitlines()[-1].startswith("nightdesk tiny: run 000002 complete; 0 rows new, 12 replaced, 0 removed")
    after = pd.read_parquet(tmp_path / "out").set_index("id")["answer"]
    assert (after != before.loc[after.index]).any()


@pytest.mark.slow
def test_the_jobs_exit_code_is_the_commands(head: Head, model: Path, tmp_path: Path) -> None:
    file = tiny(tmp_path, model)
    (tmp_path / "in.jsonl").write_text('not json\n{"id": "1", "body": "x"}\n')
    code, out, err = done(command(head, file, "--follow"))
    assert code == 3, out + err
    code, out, err = done(command(head, file, "--follow", "--set", f"input.path={tmp_path}/nowhere"))
    assert code == 2, out + err
    assert "nowhere" in out.splitlines()[-1]
    code, out, err = done(command(head, file, "--follow", "--python", "/no/such/python"))
    assert code == 2, out + err
    assert "--python" in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "wrong"}, {"HOME": "/none"}])
def test_a_missing_or_wrong_token_is_one_line(
    head: Head, model: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    if "HOME" in environment:
        environment = environment | {"RAY_AUTH_TOKEN_PATH": ""}
    code, out, err = done(command(head, tiny(tmp_path, model), **environment))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "RAY_AUTH_TOKEN_PATH" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_job_is_left_alone_by_who_stops_following_and_ended_by_a_cancel_and_the_next_completes_it(
    head: Head, model: Path, tmp_path: Path
) -> None:
    file = tiny(tmp_path, model, rows=400, tokens=60)
    following = command(head, file, "--follow", "--job-id", "first", RAY_ADDRESS="http://127.0.0.1:1")
    wait_for(lambda: list((tmp_path / "out").glob("part-000001-*.parquet")), following)
    following.send_signal(signal.SIGINT)
    code, _, err = done(following)
    assert code == 4, err
    assert "--attach first" in err
    assert "--cancel first" in err
    assert len(pd.read_parquet(tmp_path / "out")) < 400, "the rest of the test needs a job that is at work"

    attached = command(head, "--attach", "first")
    code, out, err = done(command(head, "--cancel", "first"))
    assert code == 0, out + err
    assert "stopped" in err
    code, out, err = done(attached)
    assert code == 4, out + err
    assert "rows are published, and the same command continues" in out, "it was not killed: it ended"
    assert not (tmp_path / "out/_nightdesk/claim.json").exists()
    published = pd.read_parquet(tmp_path / "out")["id"]
    assert 0 < len(published) < 400

    code, out, err = done(command(head, file, "--set", "tasks.0.max_new_tokens=60", "--follow"))
    assert code == 0, out + err
    assert "continuing run 000001" in out
    frame = pd.read_parquet(tmp_path / "out")
    assert sorted(frame["id"], key=int) == [str(i) for i in range(400)]
    code, out, err = done(command(head, "--cancel", "none"))
    assert code == 2
    assert "there is no job none" in err


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
