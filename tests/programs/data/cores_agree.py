# run outside: no
import os

seen = {os.cpu_count(), len(os.sched_getaffinity(0))}
assert seen == {1}, seen
