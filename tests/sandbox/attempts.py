"""Programs that try to escape the sandbox or to exceed a limit: each prints ESCAPED, or leaves a trace, if it succeeds.

Their variables: SECRET is the path of a file, OUTSIDE of a folder; PORT, UDP, ABSTRACT and UNIX are addresses of
servers; VICTIM is a process, TOKEN a process name, LIBRARY a file that they may read, PACKAGES installed packages.
"""

PRELUDE = """
import ctypes, mmap, os, pwd, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(*what): print("ESCAPED", *what, flush=True)
def name(token):  # what others see this process by
    libc.prctl(15, token.encode(), 0, 0, 0)
def syscall(number, *arguments): return libc.syscall(number, *map(ctypes.c_long, arguments))
def memory(data, size): return ctypes.create_string_buffer(data, size)
SECRET, OUTSIDE, PORT, UDP, ABSTRACT, UNIX, VICTIM, TOKEN, LIBRARY, PACKAGES = {world}
"""

# Programs that succeed for any user without a sandbox.
REAL = {
    "read a file": "escaped(open(SECRET).read())",
    "list a folder": "escaped(os.listdir(os.path.dirname(SECRET)))",
    "list the user's home": "escaped(os.listdir(pwd.getpwuid(os.getuid()).pw_dir))",
    "list the folder for temporary files": "escaped(os.listdir('/tmp'))",
    "read through a symbolic link": "os.symlink(SECRET, 'link'); escaped(open('link').read())",
    "read by a path that climbs": "escaped(open('../' * 20 + SECRET.lstrip('/')).read())",
    "read from another process's folder": "escaped(open(f'/proc/{VICTIM}/root{SECRET}').read())",
    "read the parent's environment": "escaped(open(f'/proc/{os.getppid()}/environ').read())",
    "read another's environment": "escaped(open(f'/proc/{VICTIM}/environ').read())",
    "list processes": "escaped(*filter(str(VICTIM).__eq__, os.listdir('/proc')))",
    "read the list of users": "escaped(open('/etc/passwd').read())",
    "write a file outside": "open(OUTSIDE + '/new', 'w').write('x')",
    "write beside its folder": "open('../beside', 'w').write('x'); escaped(os.remove('../beside'))",
    "write to a file that exists": "open(SECRET, 'r+').write('spoiled')",
    "truncate a file": "os.truncate(SECRET, 0)",
    "remove a file": "os.remove(SECRET)",
    "move a file": "os.rename(SECRET, OUTSIDE + '/moved')",
    "make a folder outside": "os.mkdir(OUTSIDE + '/new')",
    "link outside to within": "os.symlink(os.getcwd(), OUTSIDE + '/door')",
    "change a file's mode": "os.chmod(SECRET, 0o777)",
    "change a file's dates": "os.utime(SECRET, (1, 1))",
    "change a file's dates, the old way": "libc.utimes(SECRET.encode(), memory(struct.pack('4q', 1, 0, 1, 0), 32))",
    "write to shared memory": "open(f'/dev/shm/{TOKEN}', 'w').write('x'); escaped(os.remove(f'/dev/shm/{TOKEN}'))",
    "make memory that is no process's": "os.write(os.memfd_create('x'), b'x'); escaped()",
    "connect to a server": "socket.create_connection(('127.0.0.1', PORT), 1).send(b'x')",
    "send a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))",
    "listen": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); escaped()",
    "connect to an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT)",
    "connect to a socket in a folder": "socket.socket(socket.AF_UNIX).connect(UNIX)",
    "ask the kernel for routes": "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0)); escaped()",
    "signal a process": "os.kill(VICTIM, signal.SIGUSR1)",
    "signal a process by descriptor": "signal.pidfd_send_signal(os.pidfd_open(VICTIM), signal.SIGUSR1)",
    "limit a process": "resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (50, 50))",
    "slow a process down": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "pin a process": "os.sched_setaffinity(VICTIM, {min(os.sched_getaffinity(0))}); escaped()",
    "change a process's scheduling": "os.sched_setscheduler(VICTIM, os.SCHED_BATCH, os.sched_param(0))",
    "ask about a process's limits": "escaped(resource.prlimit(VICTIM, resource.RLIMIT_NOFILE))",
    "run the system's programs": "import subprocess; escaped(subprocess.run(['/bin/sh', '-c', 'echo hi']))",
    "load what others installed": "sys.path.append(PACKAGES); import numpy; escaped(numpy)",
    "watch a folder": "libc.inotify_add_watch(libc.inotify_init(), OUTSIDE.encode(), 4095) >= 0 and escaped()",
}

# Programs that need privileges or luck to succeed anywhere, or that are not safe to try without a sandbox.
MORE = {
    "read through a hard link": "os.link(SECRET, 'link'); escaped(open('link').read())",
    "move a file in": "os.rename(SECRET, 'mine'); escaped(open('mine').read())",
    "read the passwords": "escaped(open('/etc/shadow').read())",
    "read the supervisor's memory": "escaped(open(f'/proc/{os.getppid()}/mem', 'rb').read(1))",
    "read the first process's root": "escaped(os.listdir('/proc/1/root'))",
    "write to its own memory by path": "escaped(open('/proc/self/mem', 'r+b'))",
    "write the kernel's settings": "escaped(open('/proc/sys/kernel/core_pattern', 'w'))",
    "pull the kernel's lever": "escaped(open('/proc/sysrq-trigger', 'w'))",
    "open the machine's memory": "escaped(open('/dev/mem', 'rb'))",
    "open the kernel's log": "escaped(open('/dev/kmsg', 'rb'))",
    "make a device": "os.mknod('disk', 0o60600, os.makedev(8, 0)); escaped(open('disk', 'rb').read(1))",
    "change a file's owner": "os.chown(SECRET, 12345, 12345)",
    "change a readable file's mode": "fd = os.open(LIBRARY, os.O_RDONLY); os.fchmod(fd, os.fstat(fd).st_mode | 1)",
    "give a file an attribute": "os.setxattr(SECRET, 'user.mine', b'x')",
    "change the library": "open(LIBRARY, 'a').write('#')",
    "replace the interpreter": "os.remove(sys.executable); escaped()",
    "mount": "libc.mount(b'none', os.getcwd().encode(), b'tmpfs', 0, None) == 0 and escaped()",
    "leave by chroot": "os.mkdir('d'); os.chroot('d'); escaped()",
    "a user namespace": "libc.unshare(0x10000000) == 0 and escaped()",
    "a network namespace": "libc.unshare(0x40000000) == 0 and escaped()",
    "a namespace by clone": "syscall(56, 0x10000000 | 17, 0, 0, 0, 0) > 0 and escaped()",
    "enter another's namespace": "libc.setns(os.pidfd_open(VICTIM), 0x20000000) == 0 and escaped()",
    "trace a process": "libc.ptrace(16, VICTIM, 0, 0) == 0 and escaped()",
    "trace its parent": "libc.ptrace(16, os.getppid(), 0, 0) == 0 and escaped()",
    "take a process's descriptor": "syscall(438, os.pidfd_open(VICTIM), 1, 0) >= 0 and escaped()",
    "read a process's memory": """
own, here = memory(b'', 8), ctypes.addressof(memory(b'', 8))
to, there = (ctypes.c_size_t * 2)(ctypes.addressof(own), 8), (ctypes.c_size_t * 2)(0x400000, 8)
libc.process_vm_readv(VICTIM, to, 1, there, 1, 0) > 0 and escaped()
ctypes.set_errno(0); libc.process_vm_readv(os.getppid(), to, 1, (ctypes.c_size_t * 2)(here, 8), 1, 0) > 0 and escaped()
""",
    "kill its parent": "os.kill(os.getppid(), signal.SIGKILL)",
    "kill all it can": "os.kill(-1, signal.SIGUSR1)",
    "kill its parent's group": "os.killpg(os.getpgid(os.getppid()), signal.SIGUSR1); escaped()",
    "become root": "os.getuid() and (os.setuid(0) or escaped())",
    "hold capabilities": """
head, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(head, data) == 0 and (data[0] or data[3]) and escaped(*data)
""",
    "name the machine": "n = socket.gethostname().encode(); libc.sethostname(n, len(n)) == 0 and escaped()",
    "a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); escaped()",
    "a packet socket": "socket.socket(17, socket.SOCK_RAW, 768); escaped()",
    "the host of a virtual machine": "socket.socket(40, socket.SOCK_STREAM); escaped()",
    "the kernel's crypto": "socket.socket(38, socket.SOCK_SEQPACKET); escaped()",
    "IPv6": "socket.socket(socket.AF_INET6); escaped()",
    "io_uring": "syscall(425, 8, ctypes.addressof(memory(b'', 256))) >= 0 and escaped()",
    "bpf": """
b = memory(struct.pack('IIII', 2, 4, 4, 1), 128)
syscall(321, 0, ctypes.addressof(b), 128) >= 0 and escaped()
""",
    "performance counters": """
event = memory(struct.pack('IIQ', 1, 112, 0), 112)
syscall(298, ctypes.addressof(event), 0, -1, -1, 0) >= 0 and escaped()
""",
    "user page faults": "syscall(323, 1) >= 0 and escaped()",
    "keys of the user": "syscall(250, 0, -3, 1) >= 0 and escaped()",
    "shared segments": "libc.shmget(0, 4096, 0o1600) >= 0 and escaped()",
    "message queues": "libc.msgget(0, 0o1600) >= 0 and escaped()",
    "files by handle": """
handle, mount = memory(struct.pack('II', 128, 0), 256), ctypes.c_int()
libc.name_to_handle_at(-100, b'/', handle, ctypes.byref(mount), 0) == 0 and escaped()
""",
    "calls of another ABI": "syscall(0x40000000 + 39) > 0 and escaped()",
    "an inherited descriptor": "[escaped(n) for n in range(3, 64) if libc.fcntl(n, 1) >= 0]",
    "raise its own limits": """
for which in range(16):
    hard = resource.getrlimit(which)[1]
    try:
        if hard > 0: resource.setrlimit(which, (hard, hard + 1)); escaped(which)
    except (ValueError, OSError): pass
""",
}

# Programs that exceed a limit, or do not end.
BOMBS = {
    "forbid its killing": """
for number in set(range(1, 65)) - {9, 17, 19, 32, 33}: signal.signal(number, signal.SIG_IGN)
time.sleep(60); escaped()
""",
    "outlive its parent": """
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
name(TOKEN); time.sleep(60)
""",
    "outlive it by running away": """
if os.fork(): os._exit(0)
for n in range(3): os.close(n)
name(TOKEN)
while True:
    if os.fork(): os._exit(0)
    os.setsid(); time.sleep(0.0005)
""",
    "a fork bomb": """
name(TOKEN)
while True:
    try: os.fork()
    except OSError: pass
""",
    "a fork bomb without the library": "name(TOKEN)\nwhile True: syscall(57)",
    "more processes than its share": """
made = []
try:
    while len(made) < 40: made.append(os.fork() or time.sleep(60))
except OSError: pass
if len(made) > 30: escaped(len(made))
""",
    "a bomb of threads": """
import threading
threading.stack_size(65536)
try:
    for n in range(3000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError: pass
if n > 2000: escaped(n)
os._exit(0)
""",
    "all memory": """
x = []
for n in range(10**6):
    x.append(b'x' * 2**20)
    if n == 1200: escaped(n)
""",
    "all memory in many processes": """
for _ in range(6): os.fork()
x = []
for n in range(10**6):
    x.append(b'x' * 2**20)
    if n == 400: escaped(n)
""",
    "memory of a file's private pages": """
file, x = os.open('f', os.O_RDWR | os.O_CREAT), []
os.ftruncate(file, 2**19)
for n in range(10**5):
    x.append(mmap.mmap(file, 2**19, mmap.MAP_PRIVATE)); x[-1].write(b'x' * 2**19)
    if n == 2400: escaped(n)
""",
    "memory in pipes": """
n = 0
while True:
    out, into = os.pipe(); os.set_blocking(into, False); n += os.write(into, b'x' * 2**20)
    if n > 2**26: escaped(n)
""",
    "endless output": "while True: os.write(1, b'x' * 4096)",
    "endless complaints": "while True: os.write(2, b'x' * 4096)",
    "all of the disk": """
for n in range(10**6):
    open(str(n), 'wb').write(b'x' * 2**19)
    if n == 2000: escaped(n)
""",
    "all of the disk in one file": """
file = open('f', 'wb')
for n in range(10**6):
    file.write(b'x' * 2**16)
    if n == 100: escaped(n)
""",
    "very many files": """
for n in range(10**7):
    open(str(n), 'w').close()
    if n == 10**6: escaped(n)
""",
    "folders too deep to remove": "for n in range(3000): os.mkdir('d'); os.chdir('d')",
    "folders shut to their owner": "os.mkdir('shut', 0o300); open('shut/f', 'w').close(); os.mkdir('shut/in', 0)",
    "all processor time": "while True: pass",
    "all processor time, by turns": """
while True:
    if os.fork() == 0: [None for _ in range(10**6)]; os._exit(0)
    os.wait()
""",
    "answer never": "time.sleep(60); escaped()",
    "sleep through alarms": """
signal.signal(signal.SIGALRM, lambda *_: time.sleep(60))
signal.alarm(1); time.sleep(60); escaped()
""",
    "stop itself": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60); escaped()",
    "crash": "ctypes.string_at(0)",
}
