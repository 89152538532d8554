"""Which BLAS multiplies MLX's matrices on Linux: each case is a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")
has_wheel = pytest.mark.skipif(not find_spec("ngsolve_openblas"), reason="no wheel of OpenBLAS")

NAME = "from ssmlx.blas import blas_name; print(blas_name())"
WITHOUT_WHEEL = "import sys; sys.modules['ngsolve_openblas'] = None"


def run(*lines, **environment):
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stderr == ""
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


def test_mlx_that_was_imported_first_keeps_its_own():
    assert run("import mlx.core, ssmlx", NAME) == ["the reference BLAS"]


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
