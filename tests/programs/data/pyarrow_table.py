# needs: pyarrow
import pyarrow as pa, pyarrow.compute as pc

print(pc.sum(pa.chunked_array([[1, 2], [3]])).as_py())
