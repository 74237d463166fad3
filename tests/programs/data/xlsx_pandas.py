# needs: openpyxl, pandas
import pandas as pd

pd.DataFrame({"a": [1, 2]}).to_excel("a.xlsx", index=False)
print(pd.read_excel("a.xlsx").a.tolist())
