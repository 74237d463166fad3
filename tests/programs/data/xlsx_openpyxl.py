# needs: openpyxl
import openpyxl

book = openpyxl.Workbook()
book.active.append(["a", 1])
book.save("book.xlsx")
print([[cell.value for cell in row] for row in openpyxl.load_workbook("book.xlsx").active.rows])
