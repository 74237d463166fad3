# run outside: no
# on landlock: error, because /proc/meminfo is the host's there
import subprocess

total = next(line for line in open("/proc/meminfo") if line.startswith("MemTotal"))
assert total.split()[1] == str(512 << 10), total
for command in ("free", "uptime"):
    subprocess.run([command], check=True, capture_output=True)
