"""Takes from this process, for good, the network, other processes, the environment and all files but its own.

Works without privileges and without namespaces, so in a plain container too: resource limits, Landlock (Linux 5.13 or
later) for files and a seccomp filter for system calls. Only the standard library, since it runs before foreign code.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from pathlib import Path

# Numbers of the system calls that are allowed, for x86_64 and aarch64: Linux's asm/unistd_64.h, asm-generic/unistd.h.
_SYSCALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None),
    "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233), "mincore": (27, 232), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "pipe": (22, None), "pipe2": (293, 59),
    "select": (23, None), "pselect6": (270, 72), "poll": (7, None), "ppoll": (271, 73), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24), "flock": (73, 32), "fsync": (74, 82),
    "fdatasync": (75, 83), "ftruncate": (77, 46), "getdents": (78, None), "getdents64": (217, 61), "getcwd": (79, 17),
    "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "readlink": (89, None), "readlinkat": (267, 78), "umask": (95, 166), "fadvise64": (221, 223),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getitimer": (36, 102),
    "setitimer": (38, 103), "alarm": (37, None), "pause": (34, None), "getpid": (39, 172), "gettid": (186, 178),
    "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getgroups": (115, 158), "getpgrp": (111, None), "getpgid": (121, 155), "getrlimit": (97, 163),
    "getrusage": (98, 165), "sysinfo": (99, 179), "uname": (63, 160), "getcpu": (309, 168), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "set_tid_address": (218, 96), "set_robust_list": (273, 99), "get_robust_list": (274, 100), "futex": (202, 98),
    "rseq": (334, 293), "membarrier": (324, 283), "arch_prctl": (158, None), "exit": (60, 93),
    "exit_group": (231, 94), "getrandom": (318, 278), "eventfd2": (290, 19), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "restart_syscall": (219, 128),
}  # fmt: skip
_CLONE, _CLONE3, _KILL, _TGKILL, _IOCTL, _PRLIMIT = (56, 220), (435, 435), (62, 129), (234, 131), (16, 29), (302, 261)
_FCNTL = (72, 25)
_FCNTL_COMMANDS = (*range(8), 1030)
"""F_DUPFD to F_SETLKW, and F_DUPFD_CLOEXEC: not F_SETOWN and F_SETSIG, which have the kernel signal any process."""
_OPEN, _OPENAT = (2, None), (257, 56)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH of linux/audit.h
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on every machine
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute (to map a library), read a file, read a folder
_FILE_RIGHTS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14
_FOLDER_RIGHTS = _READ | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 14  # write, remove, make a file, truncate
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # bits that Landlock knows, by its version; from 5 on 16
_CLONE_THREAD = 0x10000
_TCGETS, _FIONCLEX, _FIOCLEX = 0x5401, 0x5450, 0x5451
_EPERM, _ENOSYS = 1, 38
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_libc = ctypes.CDLL(None, use_errno=True)


class NoIsolationError(Exception):
    """This machine cannot confine a process; says why."""


def confine(folder: Path, *, seconds: int, memory: int, file_size: int) -> None:
    """Confines this process to `folder` and the Python installation, which it may read.

    Call it with a single thread running. There is no way back.

    Args:
        folder: The only place to write to.
        seconds: CPU time from now on.
        memory: Bytes of address space.
        file_size: Bytes a file.

    Raises:
        NoIsolationError: where the machine lacks what it takes; the process must not run foreign code then.
    """
    machine = _MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None:
        raise NoIsolationError(f"{sys.platform} on {platform.machine()} is not supported, Linux on x86_64 or arm64 is")
    _prctl("PR_SET_PDEATHSIG", 1, signal.SIGKILL)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(used.ru_utime + used.ru_stime) + 1 + seconds
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, file_size, file_size),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ):
        resource.setrlimit(kind, (soft, hard))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # numpy reserves memory for each thread
    _prctl("PR_SET_NO_NEW_PRIVS", 38, 1)
    _drop_capabilities()
    _restrict_files(folder)
    _filter_system_calls(*machine)


def _prctl(name: str, option: int, value: int, argument: int = 0) -> None:
    zero = ctypes.c_ulong(0)
    if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(argument), zero, zero):
        raise NoIsolationError(f"{name}: {os.strerror(ctypes.get_errno())}")


def _drop_capabilities() -> None:
    """All of them: root could raise its limits again, and read what it has no right to."""
    header = ctypes.create_string_buffer(struct.pack("II", 0x20080522, 0), 8)
    if _libc.capset(header, ctypes.create_string_buffer(24)):
        raise NoIsolationError(f"capset: {os.strerror(ctypes.get_errno())}")


def _readable() -> list[Path]:
    """What Python needs to import: its installation and the system's libraries."""
    places = [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__)]
    places += ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero"]
    found = {Path(place).resolve() for place in places}
    return [path for path in sorted(found) if path.exists() and path != Path("/")]


def _restrict_files(folder: Path) -> None:
    version = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        raise NoIsolationError("its kernel has no Landlock (Linux 5.13 or later, switched on)")
    handled = (1 << _RIGHTS.get(version, 16)) - 1
    network, scoped = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("QQQ", handled, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise NoIsolationError(f"Landlock: {os.strerror(ctypes.get_errno())}")
    rights = [(path, _READ) for path in _readable()]
    rights += [(folder, _FOLDER_RIGHTS), (Path("/dev/null"), _READ | 1 << 1)]
    for path, allowed in rights:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed &= handled if path.is_dir() else handled & _FILE_RIGHTS
        rule = struct.pack("=Qi", allowed, descriptor)
        if _libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0):
            raise NoIsolationError(f"Landlock, {path}: {os.strerror(ctypes.get_errno())}")
        os.close(descriptor)
    if _libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0):
        raise NoIsolationError(f"Landlock: {os.strerror(ctypes.get_errno())}")
    os.close(ruleset)


def _filter_system_calls(column: int, architecture: int) -> None:
    """Installs a filter (linux/filter.h) that refuses every system call that is not listed.

    Threads may be started and processes not, signals go to this process alone, and no socket can be made.
    """

    def step(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, jump_true, jump_false, k)

    def when(value: int, body: list[bytes]) -> list[bytes]:
        return [step(0x15, value, 0, len(body)), *body]

    def argument(number: int) -> bytes:
        return step(0x20, 16 + 8 * number)

    allow, refuse = step(0x06, _ALLOW), step(0x06, _ERRNO | _EPERM)
    program = [step(0x20, 4), step(0x15, architecture, 1, 0), step(0x06, _KILL_PROCESS), step(0x20, 0)]
    for numbers in _SYSCALLS.values():
        number = numbers[column]
        if number is not None:
            program += when(number, [allow])
    # Before its version 3 Landlock lets a file be emptied that is only opened for reading.
    for numbers, flags in ((_OPEN, argument(1)), (_OPENAT, argument(2))):
        number = numbers[column]
        if number is not None:
            program += when(number, [flags, step(0x54, os.O_TRUNC | os.O_ACCMODE), *when(os.O_TRUNC, [refuse]), allow])
    program += when(_CLONE[column], [argument(0), step(0x45, _CLONE_THREAD, 0, 1), allow, refuse])
    program += when(_CLONE3[column], [step(0x06, _ERRNO | _ENOSYS)])  # its flags lie in memory; libc then takes clone
    requests = [step for request in (_TCGETS, _FIONCLEX, _FIOCLEX) for step in when(request, [allow])]
    program += when(_IOCTL[column], [argument(1), *requests, refuse])
    commands = [step for command in _FCNTL_COMMANDS for step in when(command, [allow])]
    program += when(_FCNTL[column], [argument(1), *commands, refuse])
    program += when(_KILL[column], [argument(0), *when(os.getpid(), [allow]), refuse])
    program += when(_TGKILL[column], [argument(0), *when(os.getpid(), [allow]), refuse])
    program += when(_PRLIMIT[column], [argument(0), *when(0, [allow]), refuse])
    program.append(refuse)
    code = ctypes.create_string_buffer(b"".join(program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    _prctl("seccomp", 22, 2, ctypes.addressof(head))
