import gzip, lzma, os, tarfile, zipfile

open("a.txt", "w").write("a" * 1000)
with tarfile.open("a.tar.xz", "w:xz") as tar:
    tar.add("a.txt")
with zipfile.ZipFile("a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
    archive.write("a.txt")
print(tarfile.open("a.tar.xz").getnames(), zipfile.ZipFile("a.zip").read("a.txt") == b"a" * 1000)
