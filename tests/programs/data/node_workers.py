# needs: !node
import subprocess

open("a.js", "w").write("""
const { Worker, isMainThread, parentPort } = require('worker_threads');
const os = require('os');
if (isMainThread) {
  if (os.availableParallelism() < 1) throw new Error('no processors');
  const worker = new Worker(__filename);
  worker.on('message', (text) => { console.log(text); });
} else parentPort.postMessage('from a worker');
""")
print(subprocess.run(["node", "a.js"], check=True, capture_output=True, text=True).stdout)
