# needs: duckdb
import duckdb

print(duckdb.sql("select sum(range) from range(1000)").fetchall())
