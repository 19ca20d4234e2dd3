"""Programs that try to exceed a limit, to change or learn something outside, or to hang or deceive the supervisor.

Each prints ESCAPED if it succeeds. They run after the prelude of `attempts.py` and HELPERS, with
100 MiB of memory, 1 MiB of disk and 1.5 seconds of processor time. Numbers of system calls are those of x86-64.
"""

HELPERS = r"""
import array, errno, fcntl, struct, threading
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MIB = 2**20
alive, keep = [], []
def at(data, size=4096):  # the address of a copy, which stays
    alive.append(memory(data, size)); return ctypes.addressof(alive[-1])
def control(file, *calls, size=4096):  # several requests on one block of memory, as long as they succeed
    block = memory(b'', size)
    return all(libc.ioctl(file, ctypes.c_ulong(call), block) == 0 for call in calls)
def child(count=1):  # forks, and waits for a place
    while True:
        try: return os.fork()
        except BlockingIOError: time.sleep(0.002)
def kept(what):  # long enough to be measured several times
    time.sleep(0.7); escaped(what)
def mapped(size, protection=3, flags=0x22, file=-1):
    at = libc.mmap(None, size, protection, flags, file, 0)
    if at is None or at == 2**64 - 1: raise OSError(ctypes.get_errno(), "mmap")
    return at
def touch(at, size, step=4096):
    if step == 4096: ctypes.memset(at, 1, size)
    else:
        for n in range(0, size, step): ctypes.string_at(at + n, 1)
def refused(result):  # what a call that did nothing returns
    return result == -1
def unlinked(size=2**19):
    file = os.open("unlinked", os.O_RDWR | os.O_CREAT); os.unlink("unlinked")
    os.write(file, b'x' * size); return file
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
def crowd(count, work):  # `count` children; how many do `work`, after which each waits
    out, into = os.pipe()
    for _ in range(count):
        if os.fork() == 0:
            try: work(); os.write(into, b'y')
            except (OSError, RuntimeError): os.write(into, b'n')
            time.sleep(60); os._exit(0)
    return b''.join(os.read(out, 1) for _ in range(count)).count(b'y')
"""

DISK = {
    "files that never had a name": """
files = [os.open('.', os.O_TMPFILE | os.O_RDWR) for _ in range(8)]
for file in files: os.posix_fallocate(file, 0, 2**19)
kept('4 MiB')""",
    "files that never had a name, mapped and closed": """
for _ in range(8):
    file = os.open('.', os.O_TMPFILE | os.O_RDWR); os.posix_fallocate(file, 0, 2**19)
    mapped(2**19, flags=1, file=file); os.close(file)
kept('4 MiB')""",
    "files without a name any more": "files = [unlinked() for _ in range(8)]; kept('4 MiB')",
    "files without a name, mapped and closed": """
for _ in range(8): file = unlinked(); mapped(4096, flags=1, file=file); os.close(file)
kept('4 MiB')""",
    "files without a name, held by children": "crowd(6, lambda: keep.append(unlinked())) == 6 and kept('3 MiB')",
    "files without a name, held by a message in flight": """
left, right = socket.socketpair()
for _ in range(8): file = unlinked(); socket.send_fds(left, [b'x'], [file]); os.close(file)
kept('4 MiB')""",
    "space behind a file's end": """
file = os.open('f', os.O_RDWR | os.O_CREAT)
libc.fallocate64(file, 1, ctypes.c_long(0), ctypes.c_long(64 * MIB)) == 0 and kept('64 MiB')""",
    "space of thousands of links": """
for n in range(4000): os.symlink('x' * 4000, f'{n}')
kept('16 MiB')""",
    "very many hard links": """
open('f', 'w').close()
for n in range(20000): os.link('f', f'{n:0250}')
kept('20,000')""",
    "very long names": """
for n in range(20000): os.mkdir(f'{n:0250}')
kept('20,000')""",
    "files that are counted while others come and go": """
for _ in range(2):
    if os.fork() == 0:
        while True:
            for n in range(50): os.mkdir(f'{os.getpid()}-{n}')
            for n in range(50): os.rmdir(f'{os.getpid()}-{n}')
for n in range(8): open(f'f{n}', 'wb').write(b'x' * 2**19)
kept('4 MiB')""",
    "attributes of its own files": """
open('f', 'w').close()
for n in range(64): os.setxattr('f', f'user.{n}', b'x' * 60000)
len(os.listxattr('f')) > 20 and kept('60,000 bytes each')""",
    "what was written at once and is gone": """
for n in range(40): open(f'{n}', 'wb').write(b'x' * 2**19)
escaped('20 MiB')""",
}

MEMORY = {
    "shared memory that it unmaps page by page": """
for _ in range(4): at = mapped(75 * MIB, flags=0x21); touch(at, 75 * MIB); libc.madvise(at, 75 * MIB, 4)
kept('300 MiB')""",
    "shared memory from the zero device": """
file = os.open('/dev/zero', os.O_RDWR)
for _ in range(4): at = mapped(75 * MIB, flags=1, file=file); touch(at, 75 * MIB); libc.madvise(at, 75 * MIB, 4)
kept('300 MiB')""",
    "page tables of nothing": """
area = mapped(2**38, 1, 0x4022)
for n in range(0, 2**38, 2 * MIB): libc.madvise(area + n, 4096, 22)
kept('512 MiB')""",
    "page tables of one small file": """
file = os.open('f', os.O_RDWR | os.O_CREAT); os.ftruncate(file, 4096)
area = mapped(2**37, 0, 0x4022)
for n in range(30000): libc.mmap(area + n * 2 * MIB, 4096, 1, 0x8011, file, 0)
kept('117 MiB')""",
    "large socket buffers": """
pairs = [socket.socketpair() for _ in range(28)]
for sides in pairs:
    for one, side in enumerate(sides):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22); side.setblocking(False)
        try:
            while side.send(b'x' * 2**20): pass
        except BlockingIOError: pass
kept('200 MiB')""",
    "small socket buffers in every process": """
def fill():
    pairs = [socket.socketpair() for _ in range(28)]
    for side in [side for sides in pairs for side in sides]:
        side.setblocking(False)
        try:
            while side.send(b'x' * 2**16): pass
        except BlockingIOError: pass
    keep.append(pairs)
crowd(6, fill); fill(); kept('80 MiB')""",
    "datagrams in every process": """
def fill():
    pairs = [socket.socketpair(type=socket.SOCK_DGRAM) for _ in range(28)]
    for side in [side for sides in pairs for side in sides]:
        side.setblocking(False)
        for size in (200000, 200000):
            try: side.send(b'x' * size)
            except OSError: pass
    keep.append(pairs)
crowd(6, fill); fill(); kept('100 MiB and more')""",
    "sockets within sockets": """
depth = 0
while depth < 500:
    left, right = socket.socketpair(); left.setblocking(False)
    try: left.send(b'x' * 2**17)
    except BlockingIOError: pass
    if depth: socket.send_fds(left, [b'x'], list(held)); [os.close(one) for one in held]
    held = (left.detach(), right.detach()); depth += 1
escaped(depth)""",
    "large pipes": """
for _ in range(28):
    out, into = os.pipe(); fcntl.fcntl(into, 1031, 2**20); os.set_blocking(into, False); os.write(into, b'x' * 2**20)
escaped('28 MiB')""",
    "huge pages that a pipe holds": """
class Piece(ctypes.Structure): _fields_ = [('at', ctypes.c_void_p), ('size', ctypes.c_size_t)]
held = 0
for _ in range(10):
    out, into = os.pipe(); os.set_blocking(into, False)
    for _ in range(16):
        at = mapped(4 * MIB); start = (at + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        libc.madvise(start, 2 * MIB, 14); touch(start, 2 * MIB)
        held += libc.vmsplice(into, ctypes.byref(Piece(start, 4096)), 1, 0) > 0; libc.munmap(at, 4 * MIB)
held > 50 and kept(f'{2 * held} MiB')""",
    "pages of a file that a pipe holds": """
file = os.open('f', os.O_RDWR | os.O_CREAT); os.posix_fallocate(file, 0, 2**19)
out, into = os.pipe()
os.splice(file, into, 4096, offset_src=0) > 0 and escaped()""",
    "pages of a file that it sends": """
file = os.open('f', os.O_RDWR | os.O_CREAT); os.posix_fallocate(file, 0, 2**19)
out, into = os.pipe()
os.sendfile(into, file, 0, 4096) > 0 and escaped()""",
    "huge pages of which it keeps a small one": "libc.prctl(42, 0, 0, 0, 0) == 1 or escaped('not off')",
    "memory of threads whose first one is gone": """
def hog():
    time.sleep(0.1); touch(mapped(300 * MIB), 300 * MIB); kept('300 MiB')
threading.Thread(target=hog).start(); syscall(60, 0)""",
    "memory while it runs away": """
at = mapped(150 * MIB); end = time.monotonic() + 1
while time.monotonic() < end:
    touch(at, 150 * MIB)
    if os.fork(): os._exit(0)
escaped('150 MiB')""",
    "memory of a child of a thread": """
def hog():
    if os.fork() == 0: touch(mapped(200 * MIB), 200 * MIB); kept('200 MiB'); os._exit(0)
threading.Thread(target=hog).start(); time.sleep(2)""",
    "memory of one that cannot be looked at": """
libc.prctl(4, 0, 0, 0, 0); touch(mapped(200 * MIB), 200 * MIB); kept('200 MiB')""",
    "memory of one with a misleading name": r"""
libc.prctl(15, b'a) R 1\nRssAnon:', 0, 0, 0); touch(mapped(200 * MIB), 200 * MIB); kept('200 MiB')""",
    "memory that it pages out": """
for _ in range(6): at = mapped(50 * MIB); touch(at, 50 * MIB); libc.madvise(at, 50 * MIB, 21)
kept('300 MiB')""",
    "pages of the huge pool": "mapped(2 * MIB, flags=0x40022); escaped()",
    "very many mappings": """
def fill():
    size = 30000 * 8192; at = mapped(size, 0, 0x4022)
    for n in range(0, size, 8192): libc.mprotect(ctypes.c_void_p(at + n), 4096, 1)
crowd(6, fill); fill(); kept('400,000 mappings')""",
    "memory while the supervisor has much to look at": """
def fill():
    size = 30000 * 8192; at = mapped(size, 0, 0x4022)
    for n in range(0, size, 8192): libc.mprotect(ctypes.c_void_p(at + n), 4096, 1)
    keep.append([os.pipe() for _ in range(20)])
    for _ in range(12): threading.Thread(target=time.sleep, args=(60,)).start()
crowd(3, fill)
for _ in range(3): at = mapped(250 * MIB); touch(at, 250 * MIB); time.sleep(0.3); libc.munmap(at, 250 * MIB)
escaped('250 MiB')""",
    "a secret file of memory": "file = syscall(447, 0); refused(file) or escaped()",
    "rights as rules of the kernel": """
rights = memory(struct.pack('QQQ', 0, 1, 0), 24)
refused(syscall(444, ctypes.addressof(rights), 24, 0)) or escaped()""",
    "filters of its own": """
class Filter(ctypes.Structure): _fields_ = [('length', ctypes.c_ushort), ('rules', ctypes.c_char_p)]
allow = Filter(4000, struct.pack('=HBBI', 6, 0, 0, 0x7fff0000) * 4000)
libc.prctl(22, 2, ctypes.byref(allow)) == 0 and escaped()""",
    "descriptor tables": "syscall(154, 1, at(struct.pack('4I', 1, 0, 0, 0)), 16) == 0 and escaped()",
    "watches of files": """
import select
many = [select.epoll() for _ in range(20)]; out, into = os.pipe()
copies = [os.dup(out) for _ in range(30)]
for one in many:
    for copy in copies: one.register(copy)
escaped(600)""",
    "rings for reading": "ring = ctypes.c_long(); refused(syscall(206, 100, ctypes.addressof(ring))) or escaped()",
    "queued signals": """
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
info, sent = memory(struct.pack('iii', 40, 0, -1), 128), 0
while sent < 20000 and syscall(129, os.getpid(), 40, ctypes.addressof(info)) == 0: sent += 1
sent > 5000 and escaped(sent)""",
    "timers": """
timer, made = ctypes.c_int(), 0
while made < 20000 and syscall(222, 0, 0, ctypes.addressof(timer)) == 0: made += 1
made > 5000 and escaped(made)""",
    "locks of single bytes": """
file = os.open('f', os.O_RDWR | os.O_CREAT)
for n in range(3000): fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * n)
if os.fork() == 0:
    lock = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 4000, 1, 0))
    struct.unpack('hhqqi4x', lock)[0] != fcntl.F_UNLCK and escaped(3000); os._exit(0)
os.wait()""",
    "a queue of messages": "refused(syscall(240, at(b'palestra'), 0o102, 0o600, 0)) or escaped()",
    "a keyring": "refused(syscall(250, 1, 0)) or escaped()",
}

PROCESSES = {
    "time of children that it will not hear of": """
signal.signal(signal.SIGCHLD, signal.SIG_IGN); done = 0
while done < 4 / 0.004:
    if child() == 0: burn(0.004); os._exit(0)
    done += 1
escaped('4 seconds')""",
    "time of children that leave no trace": """
action, done = memory(struct.pack('Q128xi', 0, 2), 152), 0  # SA_NOCLDWAIT
if libc.sigaction(17, action, None) == 0:
    while done < 4 / 0.004:
        if child() == 0: burn(0.004); os._exit(0)
        done += 1
    escaped('4 seconds')""",
    "time of orphans": """
for _ in range(200):
    if child() == 0:
        if child() == 0: burn(0.02)
        os._exit(0)
    os.wait()
escaped('4 seconds')""",
    "time of threads whose first one is gone": """
def work(): burn(4); escaped('4 seconds')
threading.Thread(target=work).start(); syscall(60, 0)""",
    "time of another interpreter": """
code = 'import time\\nwhile time.process_time() < 4: pass\\nprint("ESCAPED")'
os.execv(sys.executable, [sys.executable, '-c', code])""",
    "time without a terminal or a session": """
if os.fork(): time.sleep(60)
os.setsid(); os.close(0); os.close(2); burn(4); escaped('4 seconds')""",
    "a thread with descriptors of its own": """
stack = mapped(2**16) + 2**16 - 64
libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
refused(libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), stack, 0x10b00, None)) or escaped()""",
    "real-time scheduling": """
for policy in (os.SCHED_FIFO, os.SCHED_RR):
    try: os.sched_setscheduler(0, policy, os.sched_param(1)); escaped(policy)
    except OSError: pass""",
    "a better place in the queue": "os.nice(-5); escaped()",
    "sleep that nothing interrupts": """
for number in set(range(1, 65)) - {9, 17, 19, 32, 33}: signal.signal(number, signal.SIG_IGN)
crowd(4, lambda: os.setsid()); time.sleep(60); escaped()""",
    "stopped children": """
for _ in range(5): os.fork() or os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.2)""",
    "children that hold its output open": "crowd(5, lambda: None); print('done', flush=True)",
    "children that write when it is gone": """
for _ in range(5):
    if os.fork() == 0:
        while True: os.write(1, b'x')
time.sleep(0.1)""",
    "new groups and sessions for each": """
name(TOKEN); crowd(3, os.setsid); crowd(3, lambda: os.setpgid(0, 0)); time.sleep(0.2)""",
}

OTHERS = {
    "any signal to another": """
for number in range(1, 65):
    try: os.kill(VICTIM, number); escaped(number)
    except OSError: pass""",
    "a signal with data": "syscall(129, VICTIM, 10, at(struct.pack('iii', 10, 0, -1), 128))",
    "a signal to a thread": "syscall(234, VICTIM, VICTIM, 10); syscall(200, VICTIM, 10)",
    "a signal by way of a socket": """
left, right = socket.socketpair()
fcntl.fcntl(left, fcntl.F_SETOWN, VICTIM); fcntl.fcntl(left, 10, signal.SIGUSR1)
fcntl.fcntl(left, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK); right.send(b'x'); time.sleep(0.1)""",
    "a signal by way of a pipe": """
out, into = os.pipe(); fcntl.fcntl(out, 15, struct.pack('ii', 1, VICTIM)); fcntl.fcntl(out, 10, signal.SIGUSR1)
fcntl.fcntl(out, fcntl.F_SETFL, os.O_ASYNC); os.write(into, b'x'); time.sleep(0.1)""",
    "compare itself with another": "refused(syscall(312, os.getpid(), VICTIM, 0, 0, 0)) or escaped()",
    "another's pages": "refused(syscall(279, VICTIM, 0, 0, 0, 0)) or escaped()",
    "another's locks": """
head, size = ctypes.c_void_p(), ctypes.c_size_t()
refused(syscall(274, VICTIM, ctypes.addressof(head), ctypes.addressof(size))) or escaped()""",
    "join another's group": "os.setpgid(0, os.getpgid(VICTIM)); escaped()",
    "make another its tracer": "libc.prctl(0x59616d61, -1, 0, 0, 0) == 0 and escaped()",
}

SOCKETS = {
    "any family of sockets": """
for family in range(2, 46):
    for kind in (1, 2, 3, 5):
        try: socket.socket(family, kind); escaped(family, kind)
        except OSError: pass""",
    "pairs of any family": """
for family in range(2, 46):
    for kind in (1, 2, 5):
        try: socket.socketpair(family, kind); escaped(family, kind)
        except OSError: pass""",
    "a datagram from a pair to a name": """
one, other = socket.socketpair(type=socket.SOCK_DGRAM)
for name in ('\\0' + ABSTRACT, UNIX):
    try: one.sendto(b'x', name); escaped(name)
    except OSError as error: error.errno in (errno.EPERM, errno.EACCES) or escaped(name, error)""",
    "a message from a pair to a name": """
one, other = socket.socketpair(type=socket.SOCK_DGRAM)
for name in ('\\0' + ABSTRACT, UNIX):
    try: one.sendmsg([b'x'], [], 0, name); escaped(name)
    except OSError as error: error.errno in (errno.EPERM, errno.EACCES) or escaped(name, error)""",
    "a pair that connects anew": """
one, other = socket.socketpair(type=socket.SOCK_DGRAM)
try: one.connect('\\0' + ABSTRACT); escaped()
except OSError as error: error.errno in (errno.EPERM, errno.EACCES) or escaped(error)""",
    "a name for a socket": "s = socket.socket(socket.AF_UNIX); s.bind('here'); s.listen(); escaped()",
    "an abstract name for a socket": "s = socket.socket(socket.AF_UNIX); s.bind('\\0' + TOKEN); escaped()",
}

FILES = {
    "flags of a file by name": """
now = at(struct.pack('QIIII', 0x80, 0, 0, 0, 0), 24)
refused(syscall(469, -100, at(SECRET.encode()), now, 24, 0)) or escaped()""",
    "flags of a file that it may read": """
control(os.open(LIBRARY, os.O_RDONLY), 0x80086601, 0x40086602) and escaped()""",
    "more flags of a file that it may read": """
control(os.open(LIBRARY, os.O_RDONLY), 0x801c581f, 0x401c5820) and escaped()""",
    "the version of a file that it may read": """
control(os.open(LIBRARY, os.O_RDONLY), 0x80087601, 0x40087602) and escaped()""",
    "a copy of the library's blocks": """
file, mine = os.open(LIBRARY, os.O_RDONLY), os.open('f', os.O_RDWR | os.O_CREAT)
libc.ioctl(mine, ctypes.c_ulong(0x40049409), file) == 0 and escaped()""",
    "where a file lies on the disk": """
control(os.open(LIBRARY, os.O_RDONLY), 0xc020660b) and escaped()""",
    "a lock on the library": """
file = os.open(LIBRARY, os.O_RDONLY); fcntl.flock(file, fcntl.LOCK_EX)
if os.fork() == 0:
    try: fcntl.flock(os.open(LIBRARY, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError: escaped()
    os._exit(0)
os.wait()""",
    "a lock of the library's bytes": """
for take, ask in ((fcntl.F_SETLK, fcntl.F_GETLK), (37, 36)):
    file = os.open(LIBRARY, os.O_RDONLY); fcntl.fcntl(file, take, struct.pack('hhqqi4x', 0, 0, 0, 9, 0))
    if os.fork() == 0:
        lock = fcntl.fcntl(os.open(LIBRARY, os.O_RDONLY), ask, struct.pack('hhqqi4x', 1, 0, 0, 9, 0))
        struct.unpack('hhqqi4x', lock)[0] != fcntl.F_UNLCK and escaped(take); os._exit(0)
    os.wait()""",
    "a lease of the library": "fcntl.fcntl(os.open(LIBRARY, os.O_RDONLY), 1024, 0); escaped()",
    "news of a folder": "fcntl.fcntl(os.open(os.path.dirname(LIBRARY), os.O_RDONLY), 1026, 1); escaped()",
    "hints on the library": """
hint = memory(struct.pack('Q', 2), 8)
libc.fcntl(os.open(LIBRARY, os.O_RDONLY), 1036, hint) == 0 and escaped()""",
    "attributes of a file's name": "escaped(os.listxattr(SECRET))",
    "attributes, the new way": """
value = at(struct.pack('QII', at(b'x'), 1, 0))
syscall(463, -100, at(SECRET.encode()), 0, at(b'user.x'), value, 16)""",
    "modes, the new way": "syscall(452, -100, at(SECRET.encode()), 0o777, 0)",
    "mounts of the machine": """
request, found = memory(struct.pack('IIQQ', 24, 0, 2**64 - 1, 0), 24), memory(b'', 4096)
syscall(458, ctypes.addressof(request), ctypes.addressof(found), 100, 0) > 0 and escaped()""",
    "a mount's tree": "refused(syscall(428, -100, at(b'/', 2), 0)) or escaped()",
    "quotas": "refused(syscall(443, os.open('.', os.O_RDONLY), 0x80000700, 0, 0)) or escaped()",
    "a file through its path alone": "escaped(open(f'/proc/self/fd/{os.open(SECRET, os.O_PATH)}').read())",
    "a file opened the new way": """
how = memory(struct.pack('QQQ', 0, 0, 0), 24)
refused(syscall(437, -100, at(SECRET.encode()), ctypes.addressof(how), 24)) or escaped()""",
    "a hard link to the library": "os.link(LIBRARY, 'mine'); escaped()",
    "a rename of its own folder": "os.rename(os.getcwd(), os.path.dirname(os.getcwd()) + '/other'); escaped()",
    "calls that are not known yet": """
for number in (*range(470, 560), 1000, 2**30 - 1, 2**31 - 1):
    ctypes.set_errno(0); syscall(number, 0, 0, 0, 0, 0, 0)
    ctypes.get_errno() in (errno.ENOSYS, errno.EPERM) or escaped(number, ctypes.get_errno())""",
}

LEFTOVERS = {
    "folders 10,000 deep": "for n in range(10000): os.mkdir('d'); os.chdir('d')",
    "its folder removed": "os.rmdir(os.getcwd()); open('x', 'w')",
    "pipes and sockets in its folder": "os.mkfifo('p', 0o777); os.symlink('p', 'q'); os.link('p', 'r')",
    "names that are no text": r"""
for name in (b'\xff\xfe', b'a\nb', b'-rf', b'*', b' ', b'\x1b[2J', b'"', b'x' * 255): open(name, 'w').write('x')""",
    "files shut to everybody": "os.umask(0o777); open('f', 'w').close(); os.mkdir('d')",
    "holes": """
for n in range(2000): open(f'{n}', 'w').close(); os.truncate(f'{n}', 2**20)""",
    "links that go round": "os.symlink('.', 'a'); os.symlink('b', 'b'); os.symlink('/proc/self', 'c')",
}

ATTACKS = DISK | MEMORY | PROCESSES | OTHERS | SOCKETS | FILES | LEFTOVERS

# Programs that succeed for any user, on any kernel and file system, without a sandbox.
REAL_ATTACKS = (
    "files that never had a name",
    "files that never had a name, mapped and closed",
    "files without a name any more",
    "files without a name, mapped and closed",
    "files without a name, held by a message in flight",
    "what was written at once and is gone",
    "shared memory that it unmaps page by page",
    "shared memory from the zero device",
    "small socket buffers in every process",
    "large pipes",
    "pages of a file that a pipe holds",
    "pages of a file that it sends",
    "huge pages of which it keeps a small one",
    "memory of threads whose first one is gone",
    "filters of its own",
    "watches of files",
    "locks of single bytes",
    "a thread with descriptors of its own",
    "any signal to another",
    "a signal with data",
    "a signal to a thread",
    "a signal by way of a socket",
    "a signal by way of a pipe",
    "a datagram from a pair to a name",
    "a message from a pair to a name",
    "a pair that connects anew",
    "a name for a socket",
    "an abstract name for a socket",
    "a lock on the library",
    "a lock of the library's bytes",
    "attributes of a file's name",
)
