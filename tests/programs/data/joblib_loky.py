# needs: joblib
from joblib import Parallel, delayed

print(Parallel(n_jobs=2)(delayed(abs)(-number) for number in range(6)))
