# needs: !gcc
import subprocess

open("a.c", "w").write('#include <stdio.h>\nint main(void){puts("hello");return 0;}')
subprocess.run(["gcc", "a.c", "-o", "a.out"], check=True)
print(subprocess.run(["./a.out"], check=True, capture_output=True, text=True).stdout)
