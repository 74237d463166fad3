import os

os.mkdir("package")
open("package/__init__.py", "w").write("from .part import value\n")
open("package/part.py", "w").write("value = 3\n")
import package

os.mkdir("elsewhere")
os.chdir("elsewhere")
import package.part

print(package.value)
