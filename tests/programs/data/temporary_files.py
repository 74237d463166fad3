import os, tempfile

with tempfile.TemporaryDirectory() as directory, tempfile.NamedTemporaryFile("w") as file:
    file.write("x")
    file.flush()
    print(os.path.getsize(file.name), os.listdir(directory))
