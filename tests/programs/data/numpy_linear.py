# needs: numpy
import numpy as np

print(np.linalg.solve(np.eye(3) * 2, np.ones(3)).tolist(), np.arange(6).reshape(2, 3).sum(axis=0))
