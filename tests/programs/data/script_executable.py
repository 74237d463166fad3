import os, pathlib, stat, subprocess, tarfile

pathlib.Path("build.sh").write_text("#!/bin/sh\necho built $1\n")
os.chmod("build.sh", os.stat("build.sh").st_mode | stat.S_IXUSR)
print(subprocess.run(["./build.sh", "once"], capture_output=True, text=True).stdout)
with tarfile.open("tools.tar", "w") as tar:
    tar.add("build.sh", "tools/build.sh")
with tarfile.open("tools.tar") as tar:
    tar.extractall(".", filter="fully_trusted")
print(subprocess.run(["tools/build.sh", "again"], capture_output=True, text=True).stdout)
subprocess.run("chmod 400 build.sh && chmod +x tools/build.sh", shell=True, check=True)
print(oct(stat.S_IMODE(os.stat("build.sh").st_mode)), os.access("tools/build.sh", os.X_OK))
