# needs: !node
# on landlock: error, because /proc/stat is closed
import subprocess

shown = subprocess.run(
    ["node", "-p", "require('os').cpus().length > 0 && process.memoryUsage().rss > 0"],
    capture_output=True,
    text=True,
)
assert shown.stdout.strip() == "true", shown
