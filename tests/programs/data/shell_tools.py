import subprocess

open("a.txt", "w").write("b\na\nb\n")
print(
    subprocess.run(
        "sort a.txt | uniq -c | awk '{print $1 $2}' | tr '\\n' ' '",
        shell=True,
        capture_output=True,
        text=True,
    ).stdout
)
