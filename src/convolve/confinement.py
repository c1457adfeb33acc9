"""How a process locks itself in: Landlock, seccomp and resource limits. None of them can be undone.

Landlock binds the calling thread and those it starts later, so it comes first, before libraries start threads. The
seccomp filter binds all threads and comes last, after the imports.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STATM = "/proc/self/statm"


@dataclass(frozen=True)
class Limits:
    """What a call may use. `memory_bytes` is added to what the child has mapped when it is ready."""

    memory_bytes: int = 1 << 30
    result_bytes: int = 1 << 28
    file_bytes: int = 0
    seconds: float = 30.0


@dataclass(frozen=True)
class Confinement:
    """The layers in force in a child."""

    landlock: bool
    seccomp: bool


def limit_resources(limits: Limits) -> None:
    """Limit memory, file size, open files and processes; allow no core dumps."""
    try:
        import resource
    except ImportError:  # Windows has none
        return
    wanted = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_AS, _mapped_bytes() + limits.memory_bytes),
    ]
    for kind, limit in wanted:
        hard = resource.getrlimit(kind)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (value, value))


def _mapped_bytes() -> int:
    """Return the size of this process's address space; where the system does not tell, more than torch maps."""
    try:
        pages = int(Path(STATM).read_text().split()[0])
    except OSError:
        return 8 << 30
    return pages * os.sysconf("SC_PAGE_SIZE")


# Landlock: include/uapi/linux/landlock.h. Rights are bits that newer kernels added to.

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract unix sockets, signals
_NO_NEW_PRIVILEGES = 38


def restrict_files(readable: Sequence[Path]) -> bool:
    """Deny this process all file access but reading below these paths, and TCP. Return False without Landlock."""
    libc = _libc()
    abi = libc.syscall(_CREATE_RULESET, None, 0, 1) if libc else -1
    if libc is None or abi < 1:
        return False
    handled = _FILE_RIGHTS[max(version for version in _FILE_RIGHTS if version <= abi)]
    words = [handled, *([_TCP] if abi >= 4 else []), *([_SCOPES] if abi >= 6 else [])]
    attributes = struct.pack(f"={len(words)}Q", *words)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        for path in readable:
            _allow_reading(libc, ruleset, path)
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow_reading(libc: ctypes.CDLL, ruleset: int, path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights = _READ_FILE | _READ_DIR if path.is_dir() else _READ_FILE
        libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


# seccomp: a program of the classic Berkeley packet filter looks at the number and arguments of each system call.
# Numbers on x86_64 and aarch64; None where a machine has no such call.

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "creat": (85, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "truncate": (76, 45), "utime": (132, None),
    "utimes": (235, None), "utimensat": (280, 88), "futimesat": (261, None),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsmount": (432, 432), "unshare": (272, 97), "setns": (308, 268),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "memfd_create": (319, 279),
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "personality": (135, 92), "ioperm": (173, None), "iopl": (172, None), "quotactl": (179, 60), "acct": (163, 89),
}  # fmt: skip
_CLONE, _CLONE3, _OPEN, _OPENAT, _OPENAT2, _TGKILL = (56, 220), (435, 435), (2, None), (257, 56), (437, 437), (234, 131)
_SECCOMP = (317, 277)
_CLONE_THREAD = 0x10000
_WRITING = (
    os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_TMPFILE", 0) & ~getattr(os, "O_DIRECTORY", 0)
)
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

Instruction = tuple[int, int, int, int]


def _build_filter(machine: int, architecture: int) -> list[Instruction]:
    """Return the program: instructions (operation, skip if true, skip if false, value)."""
    deny, missing = (_RETURN, 0, 0, _ERROR | _EPERM), (_RETURN, 0, 0, _ERROR | _ENOSYS)
    reload = (_LOAD, 0, 0, _NUMBER)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        reload,
        (_AT_LEAST, 0, 1, 0x40000000),  # the x32 numbers of x86_64
        (_RETURN, 0, 0, _KILL),
    ]
    for numbers in _DENIED.values():
        if (number := numbers[machine]) is not None:
            program += [(_EQUAL, 0, 1, number), deny]
    for numbers in (_CLONE3, _OPENAT2):  # their arguments are behind pointers; libc falls back to the older call
        program += [(_EQUAL, 0, 1, numbers[machine]), missing]
    program += [
        (_EQUAL, 0, 4, _CLONE[machine]),
        (_LOAD, 0, 0, _ARGUMENTS),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        deny,
        reload,
    ]
    for numbers, argument in ((_OPEN, 1), (_OPENAT, 2)):
        if (number := numbers[machine]) is not None:
            flags = _ARGUMENTS + 8 * argument
            program += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, flags), (_ANY_BIT, 0, 1, _WRITING), deny, reload]
    program += [(_EQUAL, 0, 4, _TGKILL[machine]), (_LOAD, 0, 0, _ARGUMENTS), (_EQUAL, 1, 0, os.getpid()), deny, reload]
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def filter_system_calls() -> bool:
    """Deny this process, all its threads, what `_DENIED` lists. Return False without seccomp."""
    libc = _libc()
    architecture = _ARCHITECTURES.get(platform.machine())
    if libc is None or architecture is None:
        return False
    machine = list(_ARCHITECTURES.values()).index(architecture)
    program = b"".join(struct.pack("=HBBI", *instruction) for instruction in _build_filter(machine, architecture))
    code = ctypes.create_string_buffer(program)
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    set_filter, all_threads = 1, 1
    return bool(libc.syscall(_SECCOMP[machine], set_filter, all_threads, header) == 0)
