"""The inside of the sandbox: a script that `sandbox.py` starts, one process a program.

It reads one JSON request on stdin and writes one JSON report on stdout. Any step that fails ends
it with a line on stderr and no report, so no program ever runs half isolated.

The chain is launcher -> init -> program. The init is process 1 of a PID namespace: when it ends,
the kernel kills everything that the program left behind, whatever session it moved to.
"""

import base64
import ctypes
import json
import os
import resource
import signal
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_FLAGS = 0x7E020000  # new cgroup, UTS, IPC, user, PID, network and mount namespaces
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MOUNT_ATTR_LOCKDOWN = 1 | 2  # read-only, no set-user-id
SYS_MOUNT_SETATTR = 442  # the same number on every architecture; Linux 5.12
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
NOBODY = 65534


def call(what: str, result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def prctl(option: int, value: int) -> None:
    call(f"prctl {option}", LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    text = [None if t is None else os.fsencode(t) for t in (source, target, kind, data)]
    call(f"mount {target}", LIBC.mount(*text[:3], ctypes.c_ulong(flags), text[3]))


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def enter_namespaces() -> int:
    """Leaves every namespace of the host; returns the program's user id in the new one.

    Root's own id would be exempt from the process limit, so root maps an idle id beside it. Only
    a process outside may write that map, hence the helper.
    """
    uid, gid, pid = os.getuid(), os.getgid(), os.getpid()
    root = uid == 0
    ready, go = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(go)
        os.read(ready, 1)
        try:
            write(f"/proc/{pid}/setgroups", "deny")
            extra = f"\n1 {NOBODY} 1" if root else ""
            write(f"/proc/{pid}/uid_map", f"0 {uid} 1{extra}")
            write(f"/proc/{pid}/gid_map", f"0 {gid} 1{extra}")
        except OSError as error:
            print(f"user namespace map: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    os.close(ready)
    if root:
        os.setgroups([])
    try:
        call("unshare", LIBC.unshare(CLONE_FLAGS))
    finally:
        os.close(go)
        failed = os.waitpid(helper, 0)[1]
    if failed:
        raise OSError("the user namespace got no id map")
    return 1 if root else 0


def make_root(request: dict, uid: int) -> None:
    """An empty root in memory with the interpreter, its libraries and one writable folder."""
    # No namespaces inside: their capabilities are most of the kernel's attack surface.
    write("/proc/sys/user/max_user_namespaces", "0")
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    # This package's own folder is the mount point: it exists, and nothing bound lies under it.
    root = os.path.dirname(os.path.abspath(__file__))
    size = f"size={request['disk']},nr_inodes=2048,mode=0755"
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, size)
    for source in request["binds"]:
        target = root + source
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            write(target, "")
        mount(source, target, None, MS_BIND | MS_REC)
        lock_mount(target)
    os.mkdir(root + "/box")
    os.chown(root + "/box", uid, uid)
    os.chdir(root)
    call("pivot_root", LIBC.pivot_root(b".", b"."))
    call("umount", LIBC.umount2(b".", 2))
    os.chdir("/box")


def lock_mount(target: str) -> None:
    attr = (ctypes.c_uint64 * 4)(MOUNT_ATTR_LOCKDOWN, 0, 0, 0)
    recursive = 0x8000
    result = LIBC.syscall(
        SYS_MOUNT_SETATTR, -100, os.fsencode(target), recursive, ctypes.byref(attr), 32
    )
    call(f"read-only {target}", result)


def drop_privileges(uid: int) -> None:
    capability = 0
    while LIBC.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == 0:
        capability += 1
    if capability < 30:
        raise OSError("capabilities could not be dropped")
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def install_filter(program: bytes) -> None:
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]

    pointer = ctypes.pointer(Program(len(program) // 8, program))
    call("seccomp", LIBC.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), pointer, 0, 0))


def set_limits(request: dict) -> None:
    for name, value in (
        ("RLIMIT_CPU", request["cpu"]),
        ("RLIMIT_AS", request["memory"]),
        ("RLIMIT_NPROC", request["processes"]),
        ("RLIMIT_FSIZE", request["output"]),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_MEMLOCK", 0),
        ("RLIMIT_MSGQUEUE", 0),
    ):
        resource.setrlimit(getattr(resource, name), (value, value))


def run_program(request: dict, uid: int, fds: list[int]) -> None:
    """The last steps before exec; never returns."""
    try:
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.closerange(3, 1024)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        drop_privileges(uid)
        set_limits(request)
        install_filter(base64.b64decode(request["filter"]))
        environment = {"PATH": "/usr/bin", "HOME": "/box", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        python = request["python"]
        os.execve(python, [python, "-I", "-S", "-B", "main.py"], environment)
    finally:
        os._exit(126)


def wait_for(program: int, deadline: float) -> int | None:
    """Wait status of the program, None past the deadline; reaps orphans on the way."""
    while True:
        while (done := os.waitpid(-1, os.WNOHANG))[0]:
            if done[0] == program:
                return done[1]
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        signal.sigtimedwait([signal.SIGCHLD], left)


def init(request: dict, uid: int) -> None:
    """Process 1: builds the root, runs the program, reports."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    make_root(request, uid)
    write("main.py", request["source"])
    # Files in memory without a name: a program cannot stall us by not reading, nor read its input
    # a second time, nor lose its output to a full disk.
    fds = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
    os.write(fds[0], request["stdin"].encode())
    os.lseek(fds[0], 0, os.SEEK_SET)
    start = time.monotonic()
    program = os.fork()
    if program == 0:
        run_program(request, uid, fds)
    status = wait_for(program, start + request["wall"])
    report = {"status": status, "seconds": time.monotonic() - start}
    for name, fd in (("stdout", fds[1]), ("stderr", fds[2])):
        report[name] = base64.b64encode(os.pread(fd, request["output"], 0)).decode()
    print(json.dumps(report), flush=True)


def main() -> int:
    # If the one who asked dies, so does this, and the init with it.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.load(sys.stdin)
    uid = enter_namespaces()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            init(request, uid)
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return int(os.waitpid(child, 0)[1] != 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
