import os, sys

os.chdir(os.path.dirname(__file__))
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "data.txt"), "w") as file:
    file.write("x")
os.mkdir("below")
os.chdir("below")
assert os.path.exists(os.path.join(os.path.dirname(__file__), "data.txt"))
assert os.path.isabs(sys.path[0]) and sys.path[0] == os.path.dirname(__file__)
