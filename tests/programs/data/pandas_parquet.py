# needs: pandas, pyarrow
import pandas as pd

pd.DataFrame({"a": range(5)}).to_parquet("a.parquet")
print(pd.read_parquet("a.parquet").a.sum())
