# needs: psutil
# on landlock: error, because the processes of the host are closed
import os, psutil

memory = psutil.virtual_memory()
assert 0 < memory.available <= memory.total
psutil.cpu_percent()
process = psutil.Process()
assert process.memory_percent() > 0 and process.create_time() > 0
process.children()
print(psutil.cpu_count() >= 1, process.pid == os.getpid())
