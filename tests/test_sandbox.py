"""Untrusted programs: contained, limited, cleaned up, or not run at all."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from trace_jax.tasks import Problem, reward
from trace_jax.tasks import sandbox as sandbox_module
from trace_jax.tasks.coding import CodeTests
from trace_jax.tasks.sandbox import (
    Limits,
    SandboxError,
    SandboxUnavailable,
    require_isolation,
    run_program,
)
from trace_jax.tasks.sandbox_filter import DENIED, filter_program


def why_not():
    try:
        require_isolation()
    except SandboxUnavailable as error:
        return str(error)
    return ""


REASON = why_not()
isolated = pytest.mark.skipif(bool(REASON), reason=REASON or "isolation is there")


def children():
    """Ids of this process's children, zombies included."""
    out = set()
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            out |= set(file.read().split())
    return out


def all_processes():
    return {p for p in os.listdir("/proc") if p.isdigit()}


def open_files():
    return len(os.listdir("/proc/self/fd"))


# What a program can do


@isolated
def test_a_program_reads_its_input_and_reports_how_it_ended():
    outcome = run_program("import sys; print(sys.stdin.read().upper())", "héllo 😀")
    assert (outcome.status, outcome.code, outcome.stdout) == ("ok", 0, "HÉLLO 😀\n")
    failed = run_program("import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)")
    assert (failed.status, failed.code, failed.stdout, failed.stderr) == ("error", 3, "a\n", "b\n")
    assert run_program("import os; os.abort()").code == -6
    assert run_program("this is no program").status == "error"
    assert "�" in run_program("import os; os.write(1, b'\\xff')").stdout
    assert run_program("print(ascii(input()))", "\ud800").status == "ok"


@isolated
def test_a_program_may_use_files_and_processes_of_its_own():
    source = (
        "import subprocess, sys\n"
        "open('note', 'w').write('kept')\n"
        "out = subprocess.run([sys.executable, '-c', 'print(open(\"note\").read())'],\n"
        "                     capture_output=True, text=True)\n"
        "print(out.stdout)"
    )
    assert run_program(source).stdout.strip() == "kept"
    gone = run_program("import os; print(os.listdir('.'))")
    assert gone.stdout == "['main.py']\n", "nothing is left over from the last program"


# Limits


@isolated
@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal\nfor s in (2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "import os\nos.setsid() if os.fork() == 0 else None\nwhile True: pass",
    ],
    ids=["busy", "sleeping", "ignores signals", "leaves its session"],
)
def test_the_wall_limit_ends_a_program_and_the_caller_goes_on(source):
    """BR-124: by process, off the main thread too, while other threads run."""
    outcomes, ticks = [], 0
    limits = Limits(wall=0.7, cpu=60)
    thread = threading.Thread(target=lambda: outcomes.append(run_program(source, limits=limits)))
    start = time.monotonic()
    thread.start()
    while thread.is_alive() and time.monotonic() - start < 15:
        ticks += 1
        time.sleep(0.01)
    thread.join()
    assert outcomes[0].status == "timeout" and outcomes[0].code is None
    assert outcomes[0].seconds < 6 and ticks > 20


@isolated
def test_the_cpu_limit_ends_a_program_before_the_wall_limit():
    outcome = run_program("while True: pass", limits=Limits(wall=30, cpu=1))
    assert outcome.status == "timeout" and outcome.code == -9 and outcome.seconds < 20


@isolated
def test_a_fork_bomb_stays_small_and_leaves_nothing():
    source = (
        "import os, time\n"
        "made = 0\n"
        "while True:\n"
        "    try:\n"
        "        if os.fork() == 0: time.sleep(60)\n"
        "        made += 1\n"
        "    except OSError:\n"
        "        break\n"
        "print(made, flush=True)\n"
        "while True:\n"
        "    try: os.fork()\n"
        "    except OSError: pass\n"
    )
    before = all_processes()
    outcome = run_program(source, limits=Limits(wall=0.7, cpu=60, processes=8))
    assert 1 <= int(outcome.stdout) <= 8 and outcome.status == "timeout"
    mine = [p for p in all_processes() - before if _is_ours(p)]
    assert not mine, mine


def _is_ours(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            line = file.read()
    except OSError:
        return False
    return "main.py" in line or "sandbox_inner" in line


@isolated
def test_a_memory_bomb_fails_inside():
    outcome = run_program("x = bytearray(1 << 30)\nprint('had it')")
    assert outcome.status == "error" and "MemoryError" in outcome.stderr
    assert run_program("x = bytearray(64 << 20)\nprint('had it')").stdout == "had it\n"
    disk = "for i in range(500):\n    open(str(i), 'wb').write(bytes(1 << 17))"
    assert "No space left" in run_program(disk).stderr


@isolated
def test_memory_that_no_limit_counts_is_refused():
    source = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "print(libc.shmget(0, 1 << 20, 0o1600), libc.memfd_create(b'x', 0))"
    )
    assert run_program(source).stdout == "-1 -1\n"


@isolated
@pytest.mark.parametrize("fd", [1, 2])
def test_an_output_flood_is_cut(fd):
    source = f"import os\nwhile True: os.write({fd}, b'y' * 4096)"
    outcome = run_program(source, limits=Limits(output=50_000))
    assert outcome.status == "output"
    assert len(outcome.stdout) + len(outcome.stderr) <= 101_000
    quiet = run_program("print('y' * 40_000)", limits=Limits(output=50_000))
    assert quiet.status == "ok" and len(quiet.stdout) == 40_001


@isolated
def test_large_input_and_output_do_not_stall():
    text = "z" * 200_000
    assert run_program("print(input())", text).stdout == text + "\n"
    too_large = run_program("pass", "z" * (2 << 20))
    assert too_large.status == "error" and "exceed" in too_large.stderr


# Isolation


@isolated
def test_the_network_is_out_of_reach():
    """BR-126: neither the host's loopback nor anything beyond it, nor its abstract sockets."""
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as named:
        server.bind(("127.0.0.1", 0))
        server.listen()
        name = f"\0trace_jax_{os.getpid()}"
        named.bind(name)
        named.listen()
        source = (
            "import socket\n"
            f"for kind, there in ((socket.AF_INET, ('127.0.0.1', {server.getsockname()[1]})),\n"
            f"                    (socket.AF_UNIX, {name!r}), (socket.AF_VSOCK, (2, 1))):\n"
            "    try:\n"
            "        socket.socket(kind).connect(there)\n"
            "        print('reached', there)\n"
            "    except OSError as error:\n"
            "        print(type(error).__name__)\n"
        )
        lines = run_program(source).stdout.split()
    assert lines == ["PermissionError", "ConnectionRefusedError", "PermissionError"]


@isolated
def test_home_working_and_run_files_are_out_of_reach(tmp_path):
    """BR-126: they do not exist inside, whoever owns them, and no variable names them."""
    secret = tmp_path / "secret"
    secret.write_text("gold")
    secret.chmod(0o644)
    paths = [str(secret), os.getcwd(), os.path.abspath(__file__), os.path.expanduser("~/.cache"),
             "/etc/passwd", "/proc", "/sys", "/tmp", "/home", "/bin/sh", "/dev/shm"]
    source = f"import os; print([p for p in {paths!r} if os.path.lexists(p)], dict(os.environ))"
    out = run_program(source).stdout
    assert out.startswith("[] ")
    assert str(tmp_path) not in out and os.environ.get("HOME", "none") not in out
    assert "'HOME': '/box'" in out


@isolated
def test_the_libraries_cannot_be_changed():
    source = (
        "import os\n"
        "for path in (os.path.dirname(os.__file__), '/usr/lib'):\n"
        "    try:\n"
        "        open(path + '/new', 'a')\n"
        "        print('changed', path)\n"
        "    except OSError as error:\n"
        "        print(error.errno, os.statvfs(path).f_flag & os.ST_RDONLY)\n"
    )
    assert run_program(source).stdout.splitlines() == ["30 1", "30 1"]  # a read-only file system


@isolated
def test_no_privilege_can_be_gained():
    source = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None)\n"
        "print(libc.unshare(0x10000000), libc.mount(b'none', b'/box', b'tmpfs', 0, b''),\n"
        "      libc.ptrace(16, 1, 0, 0), libc.sethostname(b'x', 1), libc.prctl(39, 0, 0, 0, 0))\n"
        "try: os.chroot('.')\n"
        "except PermissionError: print('no chroot')\n"
        "print(libc.syscall(57 | 0x40000000) == -1)\n"
    )
    assert run_program(source).stdout == "-1 -1 -1 -1 1\nno chroot\nTrue\n"


@isolated
def test_a_program_sees_only_its_own_processes():
    source = (
        "import os\n"
        "def there(pid):\n"
        "    try: os.kill(pid, 0)\n"
        "    except PermissionError: return True\n"
        "    except ProcessLookupError: return False\n"
        "    return True\n"
        "print(os.getpid(), os.getppid(), [pid for pid in range(1, 50000) if there(pid)])"
    )
    assert run_program(source).stdout == "2 1 [1, 2]\n"


def test_the_filter_is_known_for_two_machines_and_refused_for_others():
    for machine in ("x86_64", "aarch64"):
        program = filter_program(machine)
        assert len(program) % 8 == 0 and len(program) // 8 == 11 + 2 * len(DENIED)
    assert filter_program("x86_64") != filter_program("aarch64")
    with pytest.raises(ValueError, match="no system-call filter for riscv64"):
        filter_program("riscv64")


# Cleaning up


@isolated
def test_descendants_end_with_the_program():
    """Orphans in sessions of their own, ended by the kernel, not by a search for them."""
    source = (
        "import os, sys, subprocess\n"
        "for _ in range(3):\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],\n"
        "                     start_new_session=True)\n"
        "print('left')"
    )
    before = all_processes()
    start = time.monotonic()
    assert run_program(source).stdout == "left\n"
    assert time.monotonic() - start < 10, "waits for nobody"
    names = [open(f"/proc/{p}/cmdline").read() for p in all_processes() - before
             if os.path.exists(f"/proc/{p}/cmdline")]
    assert not [n for n in names if "time.sleep(60)" in n]


@isolated
def test_two_hundred_runs_leak_nothing():
    """BR-128: no zombie, no process, no file handle; some of the runs end at their limit."""
    run_program("pass")
    processes, files = children(), open_files()
    quick = Limits(wall=0.1, cpu=60)
    outcomes = []

    def some():
        for i in range(50):
            outcomes.append(run_program("while True: pass" if i % 10 == 0 else "1 + 1",
                                        limits=quick if i % 10 == 0 else Limits()).status)

    threads = [threading.Thread(target=some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 200 and outcomes.count("timeout") == 20
    assert children() == processes and open_files() == files


@isolated
def test_the_program_dies_with_the_one_who_asked():
    code = (
        "from trace_jax.tasks.sandbox import *\n"
        "require_isolation()\n"
        "print('up', flush=True)\n"
        "run_program('while True: pass', limits=Limits(wall=40, cpu=60))"
    )
    asker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    asker.stdout.readline()
    deadline = time.monotonic() + 20
    while len(running := _descendants(asker.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    asker.kill()
    asker.communicate()
    assert len(running) >= 3, "launcher, init and program"
    deadline = time.monotonic() + 10
    while any(map(_runs, running)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, running))


def _descendants(pid):
    out = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            for child in file.read().split():
                out += [child, *_descendants(child)]
    return out


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# Failing closed


@pytest.fixture
def forgetful():
    """Isolation is looked for afresh, before and after."""
    caches = (require_isolation, sandbox_module._interpreter)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


BROKEN = {
    "no user namespaces": ("LIBC.unshare(CLONE_FLAGS)", "LIBC.unshare(-1)"),
    "no mounts": ("LIBC.mount(", "LIBC.no_such_call("),
    "no id map": ('write(f"/proc/{pid}/uid_map"', 'write(f"/proc/{pid}/no_map"'),
    "no private root": ("LIBC.pivot_root(", "LIBC.no_such_call("),
    "no read-only mounts": ("SYS_MOUNT_SETATTR = 442", "SYS_MOUNT_SETATTR = 9999"),
    "no filter": ("ctypes.c_ulong(2), pointer", "ctypes.c_ulong(99), pointer"),
    "no dropping of privileges": ("PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38",
                                  "PR_SET_NO_NEW_PRIVS = 1, 22, 24, 9999"),
}


@pytest.mark.parametrize("missing", BROKEN)
def test_without_isolation_nothing_runs(missing, forgetful, monkeypatch, tmp_path):
    """BR-126: an explicit error, and the program has not run anywhere."""
    source = sandbox_module.INNER.read_text()
    old, new = BROKEN[missing]
    assert old in source
    inner = tmp_path / "inner.py"
    inner.write_text(source.replace(old, new))
    monkeypatch.setattr(sandbox_module, "INNER", inner)
    mark = tmp_path / "ran"
    with pytest.raises(SandboxUnavailable) as caught:
        run_program(f"open({str(mark)!r}, 'w')")
    assert "\n" not in str(caught.value) and not mark.exists()


def test_other_systems_and_machines_are_refused(forgetful, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(SandboxUnavailable, match="run coding tasks on Linux"):
            run_program("pass")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SandboxUnavailable, match="no system-call filter for riscv64"):
        run_program("pass")


@isolated
def test_a_sandbox_that_fails_is_no_wrong_answer(monkeypatch, tmp_path):
    """BR-129: 1 sample of 8 meets an outage: it is not scored, the others are."""
    problem = Problem(0, "add", "f = lambda x: x", "mine", CodeTests("assert f(1) == 1", ("f",)))
    inner, good = tmp_path / "inner.py", sandbox_module.INNER
    inner.write_text("import sys; sys.exit('the service is down')")
    values = []
    for sample in range(8):
        monkeypatch.setattr(sandbox_module, "INNER", inner if sample == 3 else good)
        values.append(reward(problem, problem.answer))
    assert values == [1.0] * 3 + [None] + [1.0] * 4
    monkeypatch.setattr(sandbox_module, "INNER", inner)
    with pytest.raises(SandboxError, match="the service is down"):
        run_program("pass")


@isolated
def test_a_sandbox_that_hangs_is_stopped_and_is_no_wrong_answer(monkeypatch, tmp_path):
    inner = tmp_path / "inner.py"
    inner.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(sandbox_module, "INNER", inner)
    monkeypatch.setattr(sandbox_module, "GRACE_SECONDS", 0.2)
    before = children()
    with pytest.raises(SandboxError, match="did not answer"):
        run_program("pass", limits=Limits(wall=0.2))
    assert children() == before


@pytest.mark.parametrize("bad", [dict(wall=0), dict(memory=-1), dict(cpu=float("nan"))])
def test_limits_must_be_positive(bad):
    with pytest.raises(ValueError, match="write a positive number"):
        Limits(**bad)
