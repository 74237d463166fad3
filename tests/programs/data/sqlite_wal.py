import sqlite3

base = sqlite3.connect("a.db")
base.execute("pragma journal_mode=wal")
base.execute("create table t (a integer, b text)")
with base:
    base.executemany("insert into t values (?, ?)", [(1, "x"), (2, "y")])
print(base.execute("select * from t order by a").fetchall())
