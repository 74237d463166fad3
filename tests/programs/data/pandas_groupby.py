# needs: pandas
import pandas as pd

frame = pd.DataFrame({"a": [1, 2, 2], "b": [1.0, 2.0, 3.0]})
print(frame.groupby("a").b.mean().to_dict(), frame.describe().shape)
