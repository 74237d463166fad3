# needs: sklearn, psutil
# on landlock: other, because it falls back to one process with a warning
from sklearn.datasets import make_regression
from sklearn.linear_model import Ridge
from sklearn.model_selection import cross_val_score

x, y = make_regression(n_samples=100, n_features=5, random_state=0)
print(len(cross_val_score(Ridge(), x, y, n_jobs=2)))
