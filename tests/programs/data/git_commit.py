# needs: !git
import subprocess


def git(*words):
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


git("init", "-q", "-b", "main", "repo")
open("repo/a.txt", "w").write("a")
git("-C", "repo", "add", ".")
git("-C", "repo", "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-qm", "first")
print(git("-C", "repo", "log", "--format=%s"))
