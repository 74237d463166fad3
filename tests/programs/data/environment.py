# run outside: no
import os, time

for name in ("HOME", "LANG", "PATH", "TERM", "TMPDIR", "TZ", "USER"):
    assert os.environ[name], name
home = os.path.expanduser("~")
os.makedirs(os.path.join(home, ".cache"))
open(os.path.join(home, ".cache", "x"), "w").close()
assert os.path.commonpath([home, os.getcwd()]) != os.getcwd()
assert time.tzname
