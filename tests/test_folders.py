"""What other users put in the way of a process, and what a process leaves."""

import getpass
import os
import signal
import subprocess
import sys
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.job.conftest import CONFIG, LONGEST_S, ROOT, environment, ran, wait_for

IMPORT = "import specextend; specextend.Summarizer; import triton.knobs; print(triton.knobs.cache.dir)"


@pytest.mark.parametrize("kind, home", [("file", "private"), ("link", "shared")])
def test_nobody_stops_a_process_by_what_is_in_the_temporary_folder_or_a_shared_home(tmp_path, kind, home):
    """Torch makes a folder of a known name there when it is imported: a file was a traceback, a folder ran its code."""
    shared, elsewhere, own = (tmp_path / name for name in ("tmp", "elsewhere", "home"))
    for folder in (shared, elsewhere, own / "specextend"):
        folder.mkdir(parents=True)
    for name in (f"torchinductor_{getpass.getuser()}", "triton", "ray", "specextend"):
        (shared / name).symlink_to(elsewhere) if kind == "link" else (shared / name).touch()
    (own / "specextend").chmod(0o700 if home == "private" else 0o777)
    before = sorted(shared.iterdir())
    variables = {"TMPDIR": str(shared), "XDG_CACHE_HOME": str(own)}
    caches = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}  # of this process
    kept = {name: value for name, value in environment().items() if name not in caches}
    ended = ran(sys.executable, "-c", IMPORT, env=kept | variables).exits(0)
    assert ended.stdout.startswith(str(own if home == "private" else shared / "specextend-"))
    assert sorted(shared.iterdir()) == before, "and leaves nothing there"
    assert not [*elsewhere.iterdir()]
    assert home == "private" or not [*own.joinpath("specextend").iterdir()]


RUN = """if True:
    import os, sys, threading
    import specextend

    def tell():
        while not any(entry.is_dir() for entry in os.scandir(os.environ["TMPDIR"])):
            pass  # a file is Python's own trial whether the folder can be written
        os.kill(os.getpid(), 15)

    values = {"input.id_column": "id"}
    threading.Thread(target=tell, daemon=True).start()
    specextend.run(sys.argv[1], input=sys.argv[2], output=sys.argv[3], settings=values)
"""


@pytest.mark.parametrize("end", ["done", "refused", "SIGTERM", "SIGTERM in a call"])
def test_no_way_out_leaves_a_temporary_folder(tmp_path, end):
    """A run of a million rows left 52 MiB of ids after each start; a machine that runs every hour fills up."""
    ids = [*range(200_000), 0 if end == "refused" else -1]
    pq.write_table(
        pa.table({"text": ["a b c"] * len(ids), "id": pa.array(ids).cast("string")}), tmp_path / "in.parquet"
    )
    (tmp_path / "tmp").mkdir()
    paths = [tmp_path / "in.parquet", tmp_path / "out"]
    plan = ["-m", "specextend", "plan", "--config", CONFIG, "--set", "input.id_column=id"]
    plan += ["--input", paths[0], "--output", paths[1]]
    command = ["-c", RUN, CONFIG, *paths] if end == "SIGTERM in a call" else plan
    variables = environment() | {"TMPDIR": str(tmp_path / "tmp")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *map(str, command)], env=variables, cwd=ROOT, **pipes) as process:
        wait_for(lambda: process.poll() is not None or list((tmp_path / "tmp").glob("*/")), "temporary folder")
        if end == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LONGEST_S)
    codes = {"done": 0, "refused": 2, "SIGTERM": 75, "SIGTERM in a call": -signal.SIGTERM}
    assert process.returncode == codes[end], said
    assert "Traceback" not in said
    assert not os.listdir(tmp_path / "tmp")


def test_a_temporary_folder_without_room_is_named_before_ray_is_started(tmp_path):
    """Ray said after half a minute that a process of its own had timed out."""
    arguments = ["run", "--config", CONFIG, "--output", tmp_path / "out", "--input", ROOT / "examples" / "demo"]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the path of a socket must be short
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=False)
        if mounted.returncode:
            pytest.skip("mounting a file system needs root")
        try:
            variables = environment() | {"TMPDIR": folder, "RAY_TMPDIR": "", "RAY_ADDRESS": "local"}
            ended = ran(sys.executable, "-m", "specextend", *map(str, arguments), env=variables)
        finally:
            subprocess.run(["umount", folder], check=True)
    assert f"{folder} has room for 2 MiB, and Ray's logs and sockets need 32; make room there, or" in ended.line(1)
