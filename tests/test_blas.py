"""Which BLAS multiplies MLX's matrices on Linux: each case is a process of its own."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ssmlx import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")
has_wheel = pytest.mark.skipif(not find_spec("ngsolve_openblas"), reason="no wheel of OpenBLAS")

NAME = "from ssmlx.blas import blas_name; print(blas_name())"
WITHOUT_WHEEL = "import sys; sys.modules['ngsolve_openblas'] = None"


def run(*lines, told="", **environment):
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert told in done.stderr and bool(done.stderr) == bool(told)
    return done.stdout.splitlines()


@has_wheel
def test_mlx_alone_multiplies_with_the_wheels_and_nothing_is_left(tmp_path):
    said = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "bindings")}
    others = "import importlib.util as i\nif i.find_spec('torch'): import torch"
    (name,) = run("import ssmlx, mlx.core", others, NAME, TMPDIR=str(tmp_path), **said)
    assert name.startswith("OpenBLAS 0.3.")
    (file,) = tmp_path.iterdir()  # its folder of links is gone
    bound = [line.split() for line in file.read_text().splitlines() if "binding file" in line]
    here = {(words[3], words[-1]) for words in bound if "/libblas-" in words[6]}
    users = {Path(user).name.partition("-")[0] for user, _ in here}
    assert any(user.endswith("libmlx.so") and "cblas_sgemm" in symbol for user, symbol in here)
    assert users <= {"libmlx.so", "liblapack", "libblas"}


def test_mlx_that_was_imported_first_keeps_its_own_and_the_log_says_so():
    told = "Import ssmlx before mlx"
    assert run("import mlx.core, ssmlx", NAME, told=told) == ["the reference BLAS"]


@pytest.mark.parametrize("environment", [{"TMPDIR": "/nowhere"}, {"HOME": "/nowhere"}])
def test_it_needs_no_place_of_its_own(environment):
    (name,) = run("import ssmlx", NAME, **environment)
    assert name == run("import ssmlx", NAME)[0]


def test_without_the_wheel_it_is_the_systems_or_the_reference():
    (name,) = run(WITHOUT_WHEEL, "import ssmlx", NAME)
    assert name.startswith("OpenBLAS") or name == "the reference BLAS"


def test_a_wheel_that_does_not_load_is_passed_over(tmp_path):
    package = tmp_path / "ngsolve_openblas"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('nobody imports it')")
    (package / "libopenblas.so").write_text("no library")
    (name,) = run("import ssmlx", NAME, PYTHONPATH=f"{tmp_path}{os.pathsep}{Path.cwd()}")
    assert name in run(WITHOUT_WHEEL, "import ssmlx", NAME)


@has_wheel
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_are_as_many_as_others_leave_cores_idle(tmp_path):
    stat = tmp_path / "stat"
    (said,) = run(
        "import ssmlx, time",
        "from pathlib import Path",
        "from ssmlx import blas",
        f"stat = Path({str(stat)!r})",
        "def write(ticks):",
        "    lines = [f'cpu{n} {ticks} 0 0 50 0 0 0 0 0 0' for n in blas._usable_cores()]",
        "    stat.write_text('cpu  0 0 0 0 0 0 0 0 0 0\\n' + '\\n'.join(lines) + '\\nctxt 7\\n')",
        "most = blas._openblas.openblas_get_num_threads()",
        "write(0)",
        "threads = blas.OpenBlasThreads(stat)",
        "threads.adjust()",  # the first look
        "used = []",
        "for ticks in (1000, 1000, 1000 + 3):",  # all busy, idle, hardly busy
        "    write(ticks)",
        "    time.sleep(0.6)",
        "    threads.adjust()",
        "    used.append(blas._openblas.openblas_get_num_threads() / most)",
        "print(most > 1, *used)",
        OPENBLAS_NUM_THREADS="2",
        OMP_NUM_THREADS="2",
    )
    assert said == "True 0.5 1.0 1.0"


@has_wheel
@pytest.mark.parametrize("said", [None, "cpu0 1 2\n", "words\n"])
def test_a_machine_that_does_not_say_is_left_alone(tmp_path, said):
    stat = tmp_path / "stat"
    if said:
        stat.write_text(said)
    run(
        "import ssmlx",
        "from pathlib import Path",
        "from ssmlx import blas",
        f"threads = blas.OpenBlasThreads(Path({str(stat)!r}))",
        "threads.adjust(); threads._SECONDS = 0; threads.adjust()",
        "assert blas._openblas.openblas_get_num_threads() == threads._most",
        OPENBLAS_NUM_THREADS="2",
    )


def test_without_mlxs_cpu_backend_there_is_nothing_to_load(tmp_path):
    package = tmp_path / "mlx"
    package.mkdir()
    (package / "__init__.py").write_text("")
    lines = ("import ssmlx", "from ssmlx import blas", "print(blas._openblas)")
    assert run(*lines, PYTHONPATH=f"{tmp_path}{os.pathsep}{Path.cwd()}") == ["None"]


ALONE = f"""
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("blas", {blas.__file__!r})
blas = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blas)
"""
"""The file alone, before it has loaded anything."""


def write_cgroup(folder, version, quota):
    """A control group, as Linux shows it, that allows `quota` of every 100,000 microseconds."""
    if version == 2:
        folder.mkdir(parents=True)
        (folder / "cpu.max").write_text(f"{quota} 100000\n")
    else:
        (folder / "cpu").mkdir(parents=True)
        (folder / "cpu" / "cpu.cfs_quota_us").write_text(f"{-1 if quota == 'max' else quota}\n")
        (folder / "cpu" / "cpu.cfs_period_us").write_text("100000\n")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("quota", "cores"), [
    ("max", 64), (250_000, 2), (200_000, 2), (50_000, 1), (9_900_000, 64), ("odd", 64),
])  # fmt: skip
def test_a_container_has_as_many_cores_as_its_quota_allows(
    tmp_path, monkeypatch, version, quota, cores
):
    write_cgroup(tmp_path / "own", version, quota)
    monkeypatch.setattr(blas, "_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(blas, "_OWN_CGROUPS", tmp_path / "missing")
    monkeypatch.setattr(blas, "_usable_cores", lambda: {*range(64)})
    assert blas.num_usable_cores() == cores


def test_the_smallest_quota_of_all_groups_counts(tmp_path, monkeypatch):
    own = tmp_path / "cgroup"
    own.write_text("1:name=x\n0::/outer.slice/inner.service\n")
    inner = "outer.slice/inner.service"
    for name, quota in ((".", "max"), ("outer.slice", 300_000), (inner, 9**9)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "cpu.max").write_text(f"{quota} 100000\n")
    monkeypatch.setattr(blas, "_CGROUPS", tmp_path)
    monkeypatch.setattr(blas, "_OWN_CGROUPS", own)
    monkeypatch.setattr(blas, "_usable_cores", lambda: {*range(64)})
    assert blas.num_usable_cores() == 3


@has_wheel
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_openblas_has_no_more_threads_than_the_quota_allows(tmp_path):
    write_cgroup(tmp_path / "own", 2, 100_000)
    lines = (
        f"blas._CGROUPS = Path({str(tmp_path / 'own')!r})",
        "blas.load_openblas_before_mlx()",
        "print(blas._openblas.openblas_get_num_threads())",
    )
    assert run(ALONE, *lines, OPENBLAS_NUM_THREADS="2", OMP_NUM_THREADS="2") == ["1"]


@has_wheel
def test_the_systems_is_found_in_any_folder(tmp_path):
    """Whatever its name; the process may have another library of such a name already."""
    folder = tmp_path / "with spaces"
    folder.mkdir()
    (wheel,) = blas._files_in("ngsolve_openblas", ".", "libopenblas*.so*")
    shutil.copy(wheel, folder / "libopenblas.so.0")
    for file in blas._files_in("mlx", "../mlx_cpu.libs", "lib*.so*"):
        name = "libgfortran.so.5" if file.name.startswith("libgfortran") else file.name
        (folder / name).symlink_to(file)
    lines = (
        "blas.ctypes.util.find_library = lambda name: None",
        "print(blas._openblas_of_system())",
    )
    found = run(ALONE, *lines, LD_LIBRARY_PATH=str(folder))
    assert found == [str((folder / "libopenblas.so.0").resolve())]


@has_wheel
def test_a_fortran_library_under_its_own_name_is_no_obstacle(tmp_path):
    lines = (
        "files_in = blas._files_in",
        "def more(package, folder, pattern):",
        "    found = [*files_in(package, folder, pattern)]",
        "    plain = [one for one in found if one.name.startswith('libgfortran')]",
        f"    own = Path({str(tmp_path)!r}) / 'libgfortran.so.5'",
        "    if plain and not own.exists(): own.symlink_to(plain[0])",
        "    yield from [*found, own] if plain else found",
        "blas._files_in = more",
        "blas.load_openblas_before_mlx()",
        "print(blas.blas_name())",
    )
    (name,) = run(ALONE, *lines)
    assert name.startswith("OpenBLAS")


@has_wheel
def test_a_look_that_fails_is_not_repeated_at_once(tmp_path):
    looked = []
    threads = blas.OpenBlasThreads(tmp_path / "missing")
    threads._most = 2
    read = threads._seconds_of_others
    threads._seconds_of_others = lambda: looked.append(1) or read()
    for _ in range(3):
        threads.adjust()
    assert len(looked) == 1
