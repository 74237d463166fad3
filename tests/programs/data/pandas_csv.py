# needs: pandas
import io, pandas as pd

pd.read_csv(io.StringIO("x,y\n1,2\n3,4\n")).to_csv("out.csv", index=False)
print(open("out.csv").read())
