# on request: torch
import torch

torch.manual_seed(0)
x = torch.linspace(0, 1, 64).reshape(-1, 1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(200):
    optimizer.zero_grad()
    loss = ((model(x) - (3 * x + 1)) ** 2).mean()
    loss.backward()
    optimizer.step()
print(round(float(loss), 3))
