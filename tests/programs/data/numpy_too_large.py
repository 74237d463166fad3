# run outside: no
# needs: numpy
import numpy as np

try:
    np.ones((40000, 40000))
except MemoryError as error:
    print(type(error).__name__)
else:
    raise SystemExit("12 GiB were to be had")
