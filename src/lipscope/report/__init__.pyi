from .charts import Chart as Chart
from .charts import Panel as Panel
from .charts import Series as Series
from .draw_print import draw as draw
from .draw_print import write_figures as write_figures
from .html import write_report as write_report
from .run_charts import growth as growth
