"""A small viewer for traces, drawn on a canvas: in the report, and as a page of its own.

It needs nothing but the page. Drag to move, wheel (with Ctrl in the report) or +/− to zoom, 0 to see everything; arrows
lead from faults to their recoveries.
"""

from __future__ import annotations

from typing import Any

from belayer.observe._markup import Markup, tag
from belayer.observe._style import CSS
from belayer.observe._values import json_for_html

VIEWER_CSS = """
.viewer{position:relative;border:1px solid var(--line);border-radius:6px;overflow:hidden;background:var(--panel)}
.viewer .panes{position:relative;max-height:560px;overflow-y:auto;overflow-x:hidden}
.viewer canvas{display:block;width:100%;touch-action:pan-y;cursor:grab}.viewer canvas:active{cursor:grabbing}
.viewer .bar{display:flex;flex-wrap:wrap;gap:6px 10px;align-items:center;padding:6px 10px;
border-bottom:1px solid var(--line);font-size:13px;color:var(--muted)}
.viewer button{font:inherit;color:var(--ink);background:var(--band);border:1px solid var(--line);border-radius:5px;
padding:1px 9px;cursor:pointer}
.viewer .at{min-width:0;flex:1 1 260px;overflow-wrap:anywhere;min-height:1.5em}
"""

VIEWER_JS = r"""
(function(){"use strict";
function start(box){
const all=JSON.parse(document.getElementById(box.dataset.trace).textContent);
const colours={step:"--hidden","engine starting":"--ref","engine ready":"--ok","engine serving":"--run",fault:"--fault",
recovery:"--restore",phase:"--other",rollout:"--life",generate:"--generate",exec:"--exec",checkpoint:"--cold"};
const ROW=15,PAD=6,TOP=24;
let LEFT=150;
const names={},order=[],tracks=new Map();
for(const e of all)if(e.ph==="M"){
 if(e.name==="process_name")names[e.pid]=e.args.name;
 if(e.name==="thread_name")names[e.pid+"/"+e.tid]=e.args.name;}
for(const e of all)if(e.ph==="X"||e.ph==="i"){
 const key=e.pid+"/"+e.tid;
 if(!tracks.has(key)){tracks.set(key,{pid:e.pid,tid:e.tid,name:names[key]||key,items:[],depth:1});}
 tracks.get(key).items.push(e);}
for(const t of tracks.values())order.push(t);
order.sort((a,b)=>a.pid-b.pid||a.tid-b.tid);
let low=Infinity,high=-Infinity,y=TOP,pid=null;
for(const t of order){
 t.items.sort((a,b)=>a.ts-b.ts||(b.dur||0)-(a.dur||0));
 const open=[];
 for(const e of t.items){
  const end=e.ts+(e.dur||0);
  while(open.length&&open[open.length-1]<=e.ts)open.pop();
  e.row=open.length;open.push(end);
  t.depth=Math.max(t.depth,e.row+1);
  low=Math.min(low,e.ts);high=Math.max(high,end);}
 if(t.pid!==pid){pid=t.pid;t.heading=y;y+=20;}
 t.top=y;y+=t.depth*ROW+PAD;}
const height=Math.max(y,80);
if(!(high>low)){low=0;high=Math.max(1,high);if(!isFinite(high))high=1;}
const arrows=[],sources={};
for(const e of all){if(e.ph==="s")sources[e.id]=e;}
for(const e of all){if(e.ph==="f"&&sources[e.id])arrows.push([sources[e.id],e]);}
const canvas=box.querySelector("canvas"),at=box.querySelector(".at"),paper=canvas.getContext("2d");
let a=low,b=high,width=0,hover=null,waiting=false;
const px=t=>LEFT+(t-a)/(b-a)*(width-LEFT-8);
const time=x=>a+(x-LEFT)/(width-LEFT-8)*(b-a);
function said(us){
 const s=us/1e6;
 if(Math.abs(s)<0.001)return us.toFixed(0)+" µs";
 if(Math.abs(s)<1)return (s*1e3).toFixed(1)+" ms";
 return s<120?s.toFixed(2)+" s":Math.floor(s/60)+" min "+Math.round(s%60)+" s";}
function tick(us,step){
 if(step<1e3)return (us/1e3).toFixed(3)+" ms";
 if(step<1e6)return (us/1e6).toFixed(step<1e4?3:step<1e5?2:1)+" s";
 const s=Math.round(us/1e6);
 return high<120e6?s+" s":Math.floor(s/60)+":"+String(s%60).padStart(2,"0");}
function later(){if(!waiting){waiting=true;requestAnimationFrame(()=>{waiting=false;draw();});}}
function fit(text,room){
 if(paper.measureText(text).width<=room)return text;
 let n=text.length;
 while(n>1&&paper.measureText(text.slice(0,n)+"…").width>room)n=Math.floor(n*0.8);
 return n>1?text.slice(0,n)+"…":"";}
function draw(){
 const ratio=window.devicePixelRatio||1;
 width=canvas.clientWidth;
 if(!width)return;
 LEFT=Math.round(Math.max(92,Math.min(150,width*0.26)));
 canvas.width=Math.round(width*ratio);canvas.height=Math.round(height*ratio);
 canvas.style.height=height+"px";
 paper.setTransform(ratio,0,0,ratio,0,0);
 const style=getComputedStyle(box),c=n=>style.getPropertyValue(n).trim();
 const paint={};
 for(const k in colours)paint[k]=c(colours[k]);
 const ink=c("--ink"),muted=c("--muted"),grid=c("--grid"),panel=c("--panel"),fault=c("--fault");
 paper.clearRect(0,0,width,height);
 paper.font="11px system-ui,'DejaVu Sans',sans-serif";paper.textBaseline="middle";
 const steps=[1,2,5,10,20,50,100,200,500,1e3,2e3,5e3,1e4,2e4,5e4,1e5,2e5,5e5,1e6,2e6,5e6,1e7,15e6,3e7,6e7,12e7,3e8,6e8,
 18e8,36e8,72e8,144e8,864e8];
 const step=steps.find(s=>(b-a)/s<=Math.max(2,(width-LEFT)/90))||864e8;
 paper.fillStyle=muted;paper.strokeStyle=grid;paper.textAlign="center";
 for(let t=Math.ceil(a/step)*step;t<=b;t+=step){
  const x=Math.round(px(t))+0.5;
  paper.beginPath();paper.moveTo(x,TOP-4);paper.lineTo(x,height);paper.stroke();
  if(x>LEFT+18&&x<width-24)paper.fillText(tick(t,step),x,10);}
 paper.textAlign="left";
 for(const t of order){
  if(t.heading!==undefined){
   paper.font="600 12px system-ui,'DejaVu Sans',sans-serif";paper.fillStyle=ink;
   paper.fillText(names[t.pid]||"",8,t.heading+10);paper.font="11px system-ui,'DejaVu Sans',sans-serif";}
  paper.fillStyle=muted;paper.fillText(fit(t.name,LEFT-24),16,t.top+ROW/2-1);
  let filled=-1,row=-1;
  for(const e of t.items){
   const end=e.ts+(e.dur||0);
   if(end<a||e.ts>b)continue;
   const x=Math.max(LEFT,px(e.ts)),w=Math.max(1.2,Math.min(width,px(end))-x),top=t.top+e.row*ROW;
   if(w<1.3&&e.row===row&&Math.round(x)===filled&&e!==hover)continue;
   filled=Math.round(x);row=e.row;
   paper.fillStyle=e.ph==="i"?fault:(paint[e.cat]||muted);
   paper.fillRect(x,top,e.ph==="i"?2:w,ROW-2);
   if(e===hover){paper.strokeStyle=ink;paper.strokeRect(x+0.5,top+0.5,Math.max(1,w-1),ROW-3);}
   if(w>34){
    const light=e.cat==="rollout"||e.cat==="step"||e.cat==="engine starting";
    paper.fillStyle=light?ink:panel;
    paper.fillText(fit(e.name,w-8),x+4,top+ROW/2-1);}}}
 paper.strokeStyle=fault;paper.globalAlpha=0.55;
 for(const [from,to] of arrows){
  const s=tracks.get(from.pid+"/"+from.tid),d=tracks.get(to.pid+"/"+to.tid);
  if(!s||!d||to.ts<a||from.ts>b)continue;
  const x1=Math.max(LEFT,px(from.ts)),x2=Math.max(LEFT,Math.min(width,px(to.ts)));
  paper.beginPath();paper.moveTo(x1,s.top+ROW-2);
  paper.bezierCurveTo(x1,s.top+ROW+14,x2,d.top-14,x2,d.top);paper.stroke();}
 paper.globalAlpha=1;
 box.dataset.drawn=String(order.length);}
function find(x,yy){
 for(const t of order){
  if(yy<t.top||yy>=t.top+t.depth*ROW)continue;
  const row=Math.floor((yy-t.top)/ROW);
  let best=null;
  for(const e of t.items)if(e.row===row&&px(e.ts)-3<=x&&x<=Math.max(px(e.ts+(e.dur||0)),px(e.ts)+1)+3)best=e;
  return best;}
 return null;}
function tell(e){
 if(!e){at.textContent="";return;}
 const more=Object.entries(e.args||{}).filter(p=>p[1]!==null&&p[1]!=="").map(p=>p[0]+" "+p[1]).join(", ");
 at.textContent=e.name+" · "+(e.dur?said(e.dur):"")+" at "+said(e.ts)+(more?" · "+more:"");}
function zoom(factor,x){
 const m=time(x===undefined?(LEFT+width)/2:Math.max(LEFT,x));
 a=m-(m-a)*factor;b=m+(b-m)*factor;
 if(b-a>high-low){a=low;b=high;}
 if(b-a<10){const k=(a+b)/2;a=k-5;b=k+5;}
 later();}
function move(by){a+=by;b+=by;later();}
let down=null;
canvas.addEventListener("pointerdown",e=>{down=e.offsetX;canvas.setPointerCapture(e.pointerId);});
canvas.addEventListener("pointerup",()=>{down=null;});
canvas.addEventListener("pointermove",e=>{
 if(down!==null){move((down-e.offsetX)/(width-LEFT-8)*(b-a));down=e.offsetX;return;}
 const found=find(e.offsetX,e.offsetY);
 if(found!==hover){hover=found;tell(found);later();}});
canvas.addEventListener("wheel",e=>{
 if(box.dataset.page!=="own"&&!e.ctrlKey)return;
 e.preventDefault();zoom(e.deltaY>0?1.25:0.8,e.offsetX);},{passive:false});
box.addEventListener("keydown",e=>{
 const keys={"+":()=>zoom(0.7),"=":()=>zoom(0.7),"-":()=>zoom(1.4),"0":()=>{a=low;b=high;later();},
 ArrowLeft:()=>move(-(b-a)/8),ArrowRight:()=>move((b-a)/8)};
 if(keys[e.key]){keys[e.key]();e.preventDefault();}});
const act={"in":()=>zoom(0.6),out:()=>zoom(1.6),all:()=>{a=low;b=high;later();}};
for(const k in act)box.querySelector("[data-do="+k+"]").addEventListener("click",act[k]);
new ResizeObserver(later).observe(box);
matchMedia("(prefers-color-scheme:dark)").addEventListener("change",later);
draw();}
for(const box of document.querySelectorAll(".viewer"))start(box);
})();
"""


def viewer(events: list[dict[str, Any]], *, own_page: bool = False) -> Markup:
    """The viewer with its trace, to be followed by `viewer_script()` once in a page."""
    buttons = [
        tag("button", text, type="button", title=title, data_do=do)
        for do, text, title in (("in", "+", "zoom in"), ("out", "−", "zoom out"), ("all", "all", "see everything"))
    ]
    bar = tag("div", buttons, tag("span", class_="at", role="status"), class_="bar")
    canvas = tag("div", tag("canvas", role="img", aria_label="timeline of the run"), class_="panes")
    box = tag(
        "div",
        bar,
        canvas,
        class_="viewer",
        tabindex=0,
        data_trace="belayer-trace",
        data_page="own" if own_page else "in",
    )
    data = tag("script", json_for_html(events), type="application/json", id="belayer-trace")
    return Markup(box + data)


def viewer_script() -> Markup:
    """The code that draws every viewer of the page; goes to the page's end."""
    return tag("script", Markup(VIEWER_JS))


def viewer_page(events: list[dict[str, Any]], name: str) -> str:
    """A whole page that shows one trace."""
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"Timeline of {name}"),
        tag(
            "style",
            Markup(CSS + VIEWER_CSS + "main{max-width:none}.viewer{margin-top:14px}.viewer .panes{max-height:none}"),
        ),
    ]
    reading = "Drag to move, wheel or + and − to zoom, 0 for all. Arrows lead from a fault to what answered it."
    body = tag(
        "main", tag("header", tag("h1", f"Timeline of {name}"), tag("p", reading)), viewer(events, own_page=True)
    )
    page = tag("html", tag("head", head), tag("body", body, viewer_script()), lang="en")
    return f"<!doctype html>\n{page}\n"
