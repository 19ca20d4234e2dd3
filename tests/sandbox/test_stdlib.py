"""Programs can use the standard library, although system calls that are not on the filter's list are refused."""

import asyncio

import pytest

from palestra.sandbox import ResourceLimits, Sandbox, client

# Each prints "yes" if it works as it does without a sandbox.
WORKS = {
    "numbers": """
import math, cmath, decimal, fractions, statistics, random, secrets, numbers
random.seed(1)
print("yes" if decimal.Decimal("0.1") * 3 == decimal.Decimal("0.3") and math.comb(5, 2) == 10
      and len(secrets.token_bytes(8)) == 8 and statistics.median([3, 1, 2]) == 2 else "no")""",
    "collections and functions": """
import array, bisect, collections, contextlib, copy, dataclasses, enum, functools, graphlib, heapq, itertools, operator
import abc, types, typing, weakref
print("yes" if list(itertools.pairwise("abc")) and functools.lru_cache(lambda x: x)(1) == 1 else "no")""",
    "text and time": """
import calendar, datetime, difflib, locale, re, string, textwrap, time, unicodedata, zoneinfo
time.sleep(0.001)
zoneinfo.available_timezones()
print("yes" if re.findall(r"\\d", "a1") == ["1"] and time.strftime("%Y") else "no")""",
    "formats": """
import base64, binascii, configparser, csv, html, io, json, pickle, plistlib, struct, tomllib
import xml.etree.ElementTree as et, email.message, urllib.parse, ast, hashlib, hmac, zlib, uuid
print("yes" if json.loads(json.dumps({"a": 1})) and et.fromstring("<a/>").tag == "a" and hashlib.sha256(b"").hexdigest()
      and pickle.loads(pickle.dumps([1])) == [1] and uuid.uuid4() else "no")""",
    "archives": """
import bz2, gzip, lzma, tarfile, zipfile, io
with zipfile.ZipFile("a.zip", "w") as file: file.writestr("x", "1")
with tarfile.open("a.tar.gz", "w:gz") as file: file.add("a.zip")
with tarfile.open("a.tar.gz") as file: file.extractall("out", filter="data")
print("yes" if zipfile.ZipFile("out/a.zip").read("x") == b"1" and bz2.decompress(bz2.compress(b"y")) == b"y"
      and lzma.decompress(lzma.compress(b"z")) == b"z" and gzip.decompress(gzip.compress(b"w")) == b"w" else "no")""",
    "files and folders": """
import fileinput, filecmp, fnmatch, glob, os, pathlib, shutil, stat, tempfile
pathlib.Path("a").mkdir(); pathlib.Path("a/x").write_text("1"); shutil.copy2("a/x", "a/y"); shutil.copytree("a", "b")
shutil.move("b/x", "b/z"); os.replace("b/z", "b/w"); os.symlink("w", "b/link"); os.link("b/w", "b/hard")
os.utime("b/w", (1, 1)); os.chmod("b/w", 0o600); os.truncate("b/w", 0); shutil.disk_usage(".")
with tempfile.TemporaryDirectory() as folder: open(os.path.join(folder, "t"), "w").close()
with tempfile.TemporaryFile("w+") as file, tempfile.NamedTemporaryFile(), tempfile.SpooledTemporaryFile():
    file.write("q"); file.flush(); os.fsync(file.fileno()); file.seek(0); print("yes" if file.read() == "q" else "no")
assert len(glob.glob("b/*")) == 4 and len(list(os.scandir("a"))) == 2 and os.listdir(".")
shutil.rmtree("b"); os.walk("."); os.mkfifo("pipe"); os.getcwd(); os.path.realpath("a")""",
    "mapped files": """
import mmap
with open("f", "wb") as file: file.truncate(4096)
with open("f", "r+b") as file, mmap.mmap(file.fileno(), 0) as area: area[:2] = b"hi"; area.flush()
private = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); private[:1] = b"x"
print("yes" if open("f", "rb").read(2) == b"hi" and private[:1] == b"x" else "no")""",
    "databases": """
import dbm.dumb, shelve, sqlite3
base = sqlite3.connect("base.sqlite"); base.execute("create table t (n)")
with base: base.executemany("insert into t values (?)", [(1,), (2,)])
base.execute("pragma journal_mode = wal"); base.close(); base = sqlite3.connect("base.sqlite")
with dbm.dumb.open("d", "c") as file: file["k"] = "v"
with shelve.open("s") as file: file["k"] = [1]
print("yes" if base.execute("select sum(n) from t").fetchone() == (3,) and shelve.open("s")["k"] == [1] else "no")""",
    "threads": """
import concurrent.futures, queue, sched, threading, contextvars
with concurrent.futures.ThreadPoolExecutor(4) as pool: total = sum(pool.map(lambda n: n * n, range(10)))
event, timer = threading.Event(), threading.Timer(0.01, lambda: event.set()); timer.start()
print("yes" if total == 285 and event.wait(5) else "no")""",
    "asyncio": """
import asyncio
async def one(n): await asyncio.sleep(0.001); return n
async def main():
    async with asyncio.TaskGroup() as group: tasks = [group.create_task(one(n)) for n in range(5)]
    more = await asyncio.to_thread(sum, [1, 2])
    loop, (left, right) = asyncio.get_running_loop(), __import__("socket").socketpair()
    left.setblocking(False); right.setblocking(False); await loop.sock_sendall(left, b"x")
    return sum(task.result() for task in tasks) + more, await loop.sock_recv(right, 1)
print("yes" if asyncio.run(main()) == (13, b"x") else "no")""",
    "processes": """
import os, subprocess, sys, multiprocessing, multiprocessing.connection
if os.fork() == 0: os._exit(3)
first = os.waitstatus_to_exitcode(os.wait()[1])
done = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, input="")
left, right = multiprocessing.Pipe()
child = multiprocessing.get_context("fork").Process(target=lambda: right.send({"a": 1})); child.start()
got = left.recv(); child.join()
print("yes" if (first, done.stdout, got, child.exitcode) == (3, "42\\n", {"a": 1}, 0) else (first, done, got))""",
    "signals": """
import faulthandler, os, resource, select, selectors, signal
faulthandler.enable(); seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1)); os.kill(os.getpid(), signal.SIGUSR1)
signal.signal(signal.SIGALRM, lambda *_: seen.append(2)); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()
resource.getrusage(resource.RUSAGE_SELF); resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
out, into = os.pipe(); os.write(into, b"x"); selectors.DefaultSelector().register(out, selectors.EVENT_READ)
print("yes" if seen == [1, 2] and select.select([out], [], [], 1)[0] == [out] else seen)""",
    "the interpreter": """
import ctypes, dis, gc, inspect, importlib, logging, os, platform, pprint, runpy, sys, sysconfig, timeit, traceback
import tracemalloc, unittest, warnings, doctest, getpass, argparse, pdb, cProfile, linecache
open("other.py", "w").write("value = 5"); importlib.invalidate_caches(); import other
os.cpu_count(); os.sched_getaffinity(0); os.getloadavg; os.urandom(4); os.isatty(1); platform.platform()
tracemalloc.start(); gc.collect(); libc = ctypes.CDLL(None); call = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 7)
suite = unittest.TestSuite([unittest.FunctionTestCase(lambda: None)])
result = unittest.TextTestRunner(stream=sys.stderr).run(suite)
print("yes" if other.value == 5 and call() == 7 and result.wasSuccessful() else "no")""",
}
LIMITS = ResourceLimits(wall=20.0, cpu=10.0)


@pytest.mark.parametrize("backend", ["sandlock", pytest.param("bubblewrap", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WORKS)
def test_the_standard_library_works(name: str, backend: str) -> None:
    if reason := client.backend_problem(backend):
        pytest.skip(f"{backend} does not work here: {reason}")
    outcome = asyncio.run(Sandbox(backend).run_python(WORKS[name], limits=LIMITS))
    assert outcome.stdout == "yes\n" and outcome.ok, outcome
