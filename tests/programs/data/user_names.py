# run outside: no
import getpass, os, pathlib

print(getpass.getuser(), pathlib.Path.home().is_dir())
