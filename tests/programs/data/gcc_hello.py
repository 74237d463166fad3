# needs: !gcc
# on landlock: error, because chmod does nothing there, so that what gcc makes cannot be run
import subprocess

open("a.c", "w").write('#include <stdio.h>\nint main(void){puts("hello");return 0;}')
subprocess.run(["gcc", "a.c", "-o", "a.out"], check=True)
print(subprocess.run(["./a.out"], check=True, capture_output=True, text=True).stdout)
