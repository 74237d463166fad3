# needs: !javac
import subprocess

open("A.java", "w").write(
    'class A { public static void main(String[] a) { System.out.println("hi"); } }'
)
subprocess.run(["javac", "A.java"], check=True)
print(subprocess.run(["java", "A"], check=True, capture_output=True, text=True).stdout)
