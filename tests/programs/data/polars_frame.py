# needs: polars
import polars as pl

frame = pl.DataFrame({"city": ["a", "b", "a"], "price": [1.0, 2.0, 3.0]})
print(frame.group_by("city").agg(pl.col("price").mean()).sort("city").rows())
